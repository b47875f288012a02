import hypothesis.strategies as st
import pytest
from hypothesis import given

from core.errors import InvariantError
from engine.events import SeqId
from engine.scheduler.waiting import WaitingTable


def add(table, seq, **fields):
    defaults = {
        "arrival": seq,
        "priority": 0,
        "uncached": 10,
        "tokens_done": 0,
        "now": 0.0,
        "deadline": 100.0,
        "retracted": False,
    }
    table.add(SeqId(seq), **{**defaults, **fields})


def test_waiting_is_measured_from_arrival_in_tokens_and_seconds():
    table = WaitingTable(4)
    add(table, 1, tokens_done=100, now=5.0)
    seen = table.candidates(tokens_done=350, now=7.5)
    assert (seen.waited_tokens.tolist(), seen.waited_s.tolist()) == ([250], [2.5])


def test_expired_names_those_whose_deadline_passed():
    table = WaitingTable(4)
    add(table, 1, deadline=5.0)
    add(table, 2, deadline=9.0)
    assert table.expired(5.0) == [1]


def test_a_full_table_is_a_bug_of_the_caller():
    table = WaitingTable(1)
    add(table, 1)
    with pytest.raises(InvariantError):
        add(table, 2)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_entries_keep_their_facts_while_others_come_and_go(steps):
    table, model = WaitingTable(64), {}
    for number, (adds, pick) in enumerate(steps):
        if adds or not model:
            add(table, number, uncached=number * 7, retracted=number % 3 == 0)
            model[number] = [number * 7, number % 3 == 0, 0]
        else:
            seq = sorted(model)[pick % len(model)]
            table.remove(SeqId(seq))
            del model[seq]
        if len(table):
            table.note_bypass(table.seqs()[:1])
            model[int(table.seqs()[0])][2] += 1
        seen = table.candidates(0, 0.0)
        columns = zip(
            table.seqs().tolist(),
            seen.uncached.tolist(),
            seen.retracted.tolist(),
            seen.bypassed.tolist(),
            strict=True,
        )
        assert {seq: [*facts] for seq, *facts in columns} == model
        assert table.uncached_tokens == sum(facts[0] for facts in model.values())
