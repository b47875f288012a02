"""The measurement that says whether a transfer call blocks its thread: it must see blocking, and nothing else as that."""

import time
from types import SimpleNamespace

import pytest

from benchmarks.transfer_blocking import drive, row


class Reader:
    def __init__(self, call):
        self._call = call
        self._open = []
        self.transport = SimpleNamespace(poll=self._poll)

    def submit(self, records):
        self._call()
        self._open.append(SimpleNamespace(id=time.monotonic_ns()))
        return self._open[-1]

    def _poll(self):
        done, self._open = self._open, []
        return done


def compute():
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(("call", "blocks"), [(lambda: time.sleep(0.01), True), (compute, False)])
def test_waiting_is_blocking_and_computing_is_not(call, blocks):
    found = row(drive(Reader(call), [None], 0.1))
    assert found["wall_max_us"] >= 10e3
    # Half of the calls only poll. A machine in a machine takes more from some call than the kernel here knows.
    assert (found["blocked_over_5_ms"] > found["calls"] / 4) == blocks
    assert (found["cpu_max_us"] >= 9e3) != blocks
