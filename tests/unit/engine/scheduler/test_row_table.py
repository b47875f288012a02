import numpy as np
import pytest

from core.errors import InvariantError
from engine.events import SeqId
from engine.scheduler.row_table import RowState, RowTable


def table(rows=2):
    return RowTable(rows, 4, 16)


def test_a_row_is_reused_only_when_the_fence_of_its_last_owner_has_retired():
    rows = table(1)
    row = rows.take(SeqId(1), RowState.RUNNING)
    rows.release(row, fence=7)
    assert rows.num_free == 0
    rows.retire(6)
    assert rows.num_free == 0
    rows.retire(7)
    assert rows.take(SeqId(2), RowState.RUNNING) == row


def test_a_row_that_no_launched_step_touches_is_free_at_once():
    rows = table(1)
    rows.retire(3)
    rows.release(rows.take(SeqId(1), RowState.RUNNING), fence=3)
    assert rows.num_free == 1


def test_each_owner_has_a_generation_of_its_own():
    rows = table(1)
    seen = []
    for seq in range(3):
        row = rows.take(SeqId(seq), RowState.RUNNING)
        seen.append(int(rows.generation[row]))
        rows.release(row, 0)
    assert len(set(seen)) == 3


def test_nothing_of_the_last_owner_is_seen_by_the_next():
    rows = table(1)
    row = rows.take(SeqId(1), RowState.RUNNING)
    rows.set_stops(row, tuple(range(20)))
    rows.set_tokens(row, np.arange(5, dtype=np.int32))
    rows.append_pages(row, np.array([1, 2], np.int32))
    rows.preempts[row] = 2
    rows.deadline[row] = 1.0
    rows.release(row, 0)
    row = rows.take(SeqId(2), RowState.PREFILLING)
    assert not rows.is_stop(np.array([row]), np.array([15], np.int32), np.array([9], np.int32)).any()
    assert rows.pages(row).tolist() == []
    assert (rows.known[row], rows.preempts[row], rows.deadline[row]) == (0, 0, np.inf)


def test_a_double_release_is_a_bug():
    rows = table()
    row = rows.take(SeqId(1), RowState.RUNNING)
    rows.release(row, 9)
    with pytest.raises(InvariantError):
        rows.release(row, 9)


def test_taking_from_an_empty_table_is_a_bug():
    rows = table(1)
    rows.take(SeqId(1), RowState.RUNNING)
    with pytest.raises(InvariantError):
        rows.take(SeqId(2), RowState.RUNNING)


@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_stop_ids_count_from_the_minimum_on_whatever_their_number(count):
    rows = table()
    row = rows.take(SeqId(1), RowState.RUNNING)
    rows.set_stops(row, tuple(range(10, 10 + count)))
    rows.stops_from[row] = 5
    index = np.array([row] * 3)
    tokens = np.array([9 + count, 9 + count, 10 + count], np.int32)
    assert rows.is_stop(index, tokens, np.array([4, 5, 6], np.int32)).tolist() == [False, True, False]


def test_padding_of_the_stop_slots_matches_no_token():
    rows = table()
    row = rows.take(SeqId(1), RowState.RUNNING)
    assert not rows.is_stop(np.array([row]), np.array([0], np.int32), np.array([1], np.int32)).any()


def test_the_audit_names_what_is_wrong():
    rows = table()
    row = rows.take(SeqId(1), RowState.RUNNING)
    rows.append_pages(row, np.array([3, 3], np.int32))
    rows.tree_pages[row] = 4
    rows.committed[row] = 2
    assert {line[:2] for line in rows.audit()} == {"R3", "R4"}
    rows.state[row] = RowState.FREE
    assert {"R1", "R2"} <= {line[:2] for line in rows.audit()}
