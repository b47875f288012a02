import json

import pytest

from benchmarks.traces import mooncake
from core.clock import ManualClock
from gateway.resume import Output
from gateway.router import Work
from gateway.trace_recorder import RecorderRules, TraceRecorder
from tests.fakes.cluster import PAGE_TOKENS
from tests.fakes.sim_gateway import prompt
from tests.unit.gateway.test_router import TOKENS, Rig


@pytest.fixture
def rig():
    rig = Rig()
    rig.add("p1")
    rig.add("d1")
    return rig


def placed(rig, tokens, **changes):
    work = Work(prompt(tokens=tokens, **changes), Output())
    rig.place(work)
    work.output.accept(0, [7, 8, 9], ())
    return work


def recorded(rig, directory, works, name="g", **rules):
    clock = ManualClock(5.0)
    recorder = TraceRecorder(RecorderRules(directory=str(directory), **rules), name, clock)
    for number, work in enumerate(works):
        recorder.record(work, at=5.0 + number)
    recorder.close()
    recorder.close()
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def test_times_lengths_and_prefixes_are_recorded_and_nothing_else(rig, tmp_path):
    longer = (*TOKENS[: 4 * PAGE_TOKENS], *range(900, 940))
    works = [placed(rig, TOKENS), placed(rig, longer, session="secret-name"), placed(rig, TOKENS, tenant="other")]
    first, second, third = recorded(rig, tmp_path, works)
    assert (first["timestamp"], second["timestamp"]) == (0, 1000)
    assert (first["input_length"], first["output_length"], first["block_size"]) == (len(TOKENS), 3, PAGE_TOKENS)
    assert len(first["hash_ids"]) == len(TOKENS) // PAGE_TOKENS
    assert first["hash_ids"][:4] == second["hash_ids"][:4] and first["hash_ids"][4] != second["hash_ids"][4]
    assert not set(first["hash_ids"]) & set(third["hash_ids"])
    assert set(first) == {"timestamp", "input_length", "output_length", "hash_ids", "block_size"}
    assert "secret-name" not in (tmp_path / "g.jsonl").read_text()


def test_two_files_cannot_be_compared_with_each_other_or_with_a_cache(rig, tmp_path):
    work = placed(rig, TOKENS)
    one, other = (recorded(rig, tmp_path, [work], name=name)[0]["hash_ids"] for name in ("a", "b"))
    events = next(iter(work.chains.values())).events
    assert not set(one) & set(other) and not set(one) & set(events)


def test_recording_stops_at_its_bound(rig, tmp_path):
    assert len(recorded(rig, tmp_path, [placed(rig, TOKENS)] * 50, max_bytes=600)) < 6


def test_a_recorded_file_is_a_trace(rig, tmp_path):
    recorded(rig, tmp_path, [placed(rig, TOKENS), placed(rig, TOKENS)])
    trace = mooncake(tmp_path / "g.jsonl")
    assert [turn.num_tokens for turn in trace.turns] == [len(TOKENS)] * 2
    assert trace.turns[0].blocks == trace.turns[1].blocks
