"""The thread of a connected source: it sleeps when nothing is to do, wakes for every job, and ends with its peer."""

import threading

import numpy as np
import pytest

from core.clock import ManualClock
from core.errors import NoCapacity, TransferFailed
from core.ids import LeaseId, TransferId
from kv_transfer.api import OpState, Records
from kv_transfer.backends.lane import Job, Lane
from kv_transfer.backends.ledger import OpLedger

NO_RECORDS = Records(0, 0, *(np.zeros(0, np.int64) for _ in range(3)))


class Bench:
    """A lane whose jobs do what `work` does."""

    def __init__(self, work=lambda job: None, max_jobs=1000):
        self.over = threading.Semaphore(0)
        self.ledger = OpLedger(ManualClock(), self.over.release)
        self.lane = Lane("test", self.ledger, work, max_jobs)

    def submit(self):
        return self.lane.submit(lambda: Job(self.ledger.open(TransferId("t"), 0), NO_RECORDS, LeaseId(1), 1e9))

    def wait(self, count):
        assert all(self.over.acquire(timeout=10) for _ in range(count)), "a job was never run"


def test_every_job_is_run_once_however_the_lane_falls_asleep():
    runs = []
    bench = Bench(runs.append)
    for burst in [1, 2, 1, 5, 1, 1, 40] * 10:
        ops = [bench.submit() for _ in range(burst)]
        bench.wait(burst)
        assert {op.state for op in ops} == {OpState.DONE}
    bench.lane.stop()
    assert len(runs) == 510
    assert bench.ledger.num_open == 0


def test_jobs_of_several_threads_beside_cancellations_all_end():
    bench = Bench(max_jobs=10**6)

    def submit_and_cancel():
        for number in range(300):
            op = bench.submit()
            if number % 3 == 0:
                bench.lane.cancel(op)

    threads = [threading.Thread(target=submit_and_cancel) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.wait(1200)
    bench.lane.stop()
    assert bench.ledger.num_open == 0
    assert len(bench.ledger.poll()) == 1200, "an operation ended twice or not at all"


@pytest.mark.parametrize("busy", [False, True], ids=["asleep", "at work"])
def test_a_stopped_lane_ends_what_waits_and_takes_nothing_more(busy):
    begun, go_on = threading.Event(), threading.Event()

    def work(job):
        begun.set()
        assert go_on.wait(10)
        job.check(ManualClock())

    bench = Bench(work, max_jobs=3)
    ops = [bench.submit() for _ in range(3 if busy else 0)]
    if busy:
        assert begun.wait(10)
        with pytest.raises(NoCapacity):
            bench.submit()
        threading.Timer(0.05, go_on.set).start()
    bench.lane.stop()
    bench.lane.stop()
    assert [op.state for op in ops] == [OpState.FAILED] * len(ops)
    with pytest.raises(TransferFailed):
        bench.submit()
