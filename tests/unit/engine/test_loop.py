import gc
import sys
import tracemalloc

import numpy as np
import pytest

from core.errors import InvariantError
from engine.barrier import Exchange
from engine.runner.stub_runner import StubRunner, mixed_tokens
from tests.fakes.engine_rig import Rig
from tests.fakes.kv_runner import KvRunner

PROMPT = list(range(1, 24))


class LoggingRunner:
    """Notes launches and collects of the runner inside."""

    def __init__(self, inner):
        self.inner, self.log = inner, []

    def launch(self, plan):
        handle = self.inner.launch(plan)
        self.log.append(("launch", handle["plan"].step))
        return handle

    def collect(self, handle):
        self.log.append(("collect", handle["plan"].step))
        return self.inner.collect(handle)

    def close(self):
        self.inner.close()


def test_a_step_is_collected_after_the_next_one_is_launched():
    runner = LoggingRunner(KvRunner(64, 8, 4))
    rig = Rig(runner=runner)
    rig.submit(PROMPT[:8], 4)
    rig.run()
    assert runner.log == [
        ("launch", 1),
        ("launch", 2),
        ("collect", 1),
        ("launch", 3),
        ("collect", 2),
        ("launch", 4),
        ("collect", 3),
        ("collect", 4),
    ]


def test_nothing_is_launched_and_nothing_is_told_without_work():
    rig = Rig()
    assert rig.turn() is False
    assert rig.plans == 0
    assert rig.sink.batches == 0


def test_calls_of_the_inbox_run_before_the_plan_of_the_same_pass():
    rig = Rig()
    rig.inbox.calls.append(lambda engine: rig.submit(PROMPT, 2))
    assert rig.turn() is True
    assert rig.plans == 1


def test_one_batch_of_events_per_step_in_steady_decode():
    rig = Rig(num_pages=200)
    for i in range(8):
        rig.submit([i + 1] * 4, 40)
    for _ in range(6):
        rig.turn()
    before = rig.sink.batches
    for _ in range(10):
        rig.turn()
    assert rig.sink.batches - before == 10


def test_a_closed_inbox_ends_the_loop_after_the_step_in_flight():
    rig = Rig()
    rig.submit(PROMPT, 50)
    rig.turn()
    rig.inbox.is_closed = True
    rig.loop.run()
    assert rig.plans == 1
    assert rig.runner._queue == []


def test_a_result_of_another_step_is_a_bug():
    rig = Rig()
    real = rig.runner.collect
    rig.runner.collect = lambda handle: type(real(handle))(
        step=99, tokens=np.zeros((1, 1), np.int32), count=np.ones(1, np.int32)
    )
    rig.submit(PROMPT, 5)
    with pytest.raises(InvariantError, match="step 99"):
        rig.run()


def test_a_step_that_chose_nothing_where_it_should_is_a_bug():
    rig = Rig()
    real = rig.runner.collect

    def collect(handle):
        result = real(handle)
        return type(result)(step=result.step, tokens=result.tokens, count=result.count * 0)

    rig.runner.collect = collect
    rig.submit(PROMPT[:4], 5)
    with pytest.raises(InvariantError, match="chose no token"):
        rig.run()


def test_the_audit_stops_the_loop_when_it_finds_anything():
    rig = Rig(audit_every_steps=2)
    rig.submit(PROMPT[:4], 9)
    rig.loop.turn()
    rig.holdings.promised_pages = 1
    with pytest.raises(InvariantError, match="promised"):
        for _ in range(5):
            rig.loop.turn()


class OtherRank:
    """A group in which somebody else has work for a few passes."""

    def __init__(self, busy):
        self.busy, self.seen = busy, []

    def exchange(self, mine):
        self.seen.append(mine.copy())
        agreed = mine.copy()
        if self.busy:
            self.busy -= 1
            agreed[Exchange.TOKENS] += 5
        return agreed


def test_a_rank_without_work_launches_empty_steps_with_its_group():
    rig = Rig()
    rig.loop.barrier = OtherRank(3)
    rig.run()
    assert rig.plans == 3
    assert rig.engine.statistics()["steps"] == 3
    rig.submit(PROMPT, 3)
    rig.run()
    assert {int(row[Exchange.TOKENS]) for row in rig.loop.barrier.seen} >= {16, 7, 1}


def test_times_are_counted_by_phase():
    rig = Rig()
    ticks = iter(range(10_000))
    rig.loop.cpu_time = lambda: float(next(ticks))
    rig.loop.wall_time = lambda: float(next(ticks))
    rig.submit(PROMPT[:4], 2)
    rig.run()
    times = rig.loop.times
    assert times.steps == 2
    assert (times.ingest, times.plan, times.launch) == (times.passes, times.passes, times.passes)
    assert times.process == times.collect_wait == 2


# The cost of a steady decode step.


class CountingSink:
    def __init__(self):
        self.tokens = 0

    def emit(self, events):
        self.tokens += len(events.seqs)


def steady(num_rows, num_drafts=0):
    """A rig in steady decode: every row produces tokens each step and crosses page borders now and then."""
    accepted = lambda seeds, positions: (positions % 2).astype(np.int32)
    outputs = 150 if not num_drafts else 300
    rig = Rig(
        page_tokens=16,
        num_pages=num_rows * (outputs // 16 + 4) + 8,
        num_rows=num_rows,
        chunk_tokens=8192,
        max_partial_prefills=64,
        runner=StubRunner(num_rows, mixed_tokens(90), num_drafts=num_drafts, accepted=accepted),
        num_drafts=num_drafts,
    )
    rig.loop.sink = CountingSink()
    for i in range(num_rows):
        rig.submit([1 + i % 80] * (3 + i % 16), outputs, seed=i)
    for _ in range(10):
        rig.loop.turn()
    assert rig.engine.load().running_requests == num_rows
    return rig


def allocations(rig, passes=48):
    """Most traced allocations that one pass leaves or makes at its peak, and allocator blocks kept over all passes."""
    gc.collect()
    for _ in range(4):
        rig.loop.turn()
    before = sys.getallocatedblocks()
    for _ in range(passes):
        rig.loop.turn()
    kept = sys.getallocatedblocks() - before
    tracemalloc.start()
    peak = 0
    try:
        for _ in range(8):
            tracemalloc.reset_peak()
            start = tracemalloc.take_snapshot()
            rig.loop.turn()
            end = tracemalloc.take_snapshot()
            peak = max(peak, sum(max(0, stat.count_diff) for stat in end.compare_to(start, "filename")))
    finally:
        tracemalloc.stop()
    return peak, kept


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_steady_decode_step_makes_no_python_object_per_row(num_drafts):
    few, many = steady(32, num_drafts), steady(256, num_drafts)
    few_peak, few_kept = allocations(few)
    many_peak, many_kept = allocations(many)
    assert many.loop.sink.tokens > 50 * 256
    assert many_kept <= few_kept + 64, (few_kept, many_kept)
    assert many_peak <= few_peak + 64, (few_peak, many_peak)


def test_a_planted_object_per_row_would_be_noticed():
    few, many = steady(32), steady(256)
    kept = []

    class Hoarder(CountingSink):
        def emit(self, events):
            kept.append([(seq,) for seq in events.seqs.tolist()])

    few.loop.sink, many.loop.sink = Hoarder(), Hoarder()
    few_peak, few_kept = allocations(few)
    many_peak, many_kept = allocations(many)
    assert many_kept > few_kept + 64
    assert many_peak > few_peak + 64
