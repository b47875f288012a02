"""The MORI adapter against a fake `mori.io`: full send queue, lost completion, failed registration, zero bytes (report 38)."""

import sys
import time

import numpy as np
import pytest

from core.errors import BadRequest, ConfigError, NoCapacity, TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.api import MemoryRegion
from kv_transfer.backends.mori_engine import MoriEngine, open_engine
from kv_transfer.backends.native import EngineSpec, Outcome
from kv_transfer.memory import allocate, region_view
from tests.fakes.fake_mori import FakeMori
from tests.fakes.kv_ends import copies

NBYTES = 1 << 16


@pytest.fixture
def mori():
    return FakeMori()


class Ends:
    def __init__(self, mori: FakeMori):
        self.mori = mori
        self.memory = [allocate([NBYTES], incarnation=fresh_incarnation()) for _ in range(2)]
        self.served, self.landed = (region_view(memory.regions[0]) for memory in self.memory)
        self.served[:] = np.random.default_rng(5).integers(1, 255, NBYTES, dtype=np.uint8)
        self.source = self.open("source", self.memory[0].regions, serves=True)
        self.reader = self.open("reader", self.memory[1].regions)
        self.peer = self.reader.connect(self.source.export(), 1.0)

    def open(self, name, regions, **options) -> MoriEngine:
        return MoriEngine(EngineSpec(module="mori", name=name, **options), regions, self.mori)

    def read(self, *at: int) -> int:
        return self.reader.post(self.peer, copies(list(at), list(at), [4096] * len(at)))

    def close(self):
        self.reader.close()
        self.source.close()
        del self.served, self.landed
        for memory in self.memory:
            memory.close()


@pytest.fixture
def ends(mori):
    ends = Ends(mori)
    yield ends
    ends.close()


def whole(ends) -> Outcome | None:
    return ends.reader.wait(ends.read(*range(0, NBYTES, 4096)), 30.0)


def test_a_read_lands_and_is_proven(ends):
    assert whole(ends) == Outcome()
    assert np.array_equal(ends.served, ends.landed)


def test_a_full_send_queue_is_no_failure_of_the_peer_and_the_next_post_works(ends):
    ends.mori.faults.sq_full = 2
    for _ in range(2):
        with pytest.raises(NoCapacity):
            ends.read(0)
    assert not ends.landed.any()
    assert whole(ends) == Outcome()


def test_a_failed_read_proves_nothing_and_the_rest_of_it_really_lands_later(ends):
    ends.mori.faults.fail_after = 3
    outcome = whole(ends)
    assert outcome.error and not outcome.proven
    before = int(ends.landed.astype(bool).sum())
    for late in ends.mori.faults.late_writes:
        late.join()
    assert int(ends.landed.astype(bool).sum()) > before, "the fake must show why failures prove nothing"


def test_after_a_failure_a_new_session_reads_again(ends):
    ends.mori.faults.fail_after = 0
    assert whole(ends).error
    assert whole(ends) == Outcome()


def test_destroying_the_engine_stops_what_a_failed_read_left_behind(ends):
    ends.mori.faults.fail_after, ends.mori.faults.late_s = 3, 0.3
    whole(ends)
    ends.reader.close()
    ends.landed[:] = 0
    for late in ends.mori.faults.late_writes:
        late.join()
    assert not ends.landed.any()
    assert "reader" not in ends.mori.engines


def test_a_lost_completion_is_never_over_until_the_engine_is_destroyed(ends):
    ends.mori.faults.lost = 1
    ticket = ends.read(0)
    assert ends.reader.wait(ticket, 0.05) is None
    other = ends.read(4096)
    assert ends.reader.wait(other, 30.0) == Outcome(), "the next read takes a new session"
    ends.reader.close()
    outcome = ends.reader.wait(ticket, 0.0)
    assert outcome.error and outcome.proven


def test_no_session_posts_nothing(ends):
    ends.mori.faults.no_session = 1
    with pytest.raises(TransferFailed):
        ends.read(0)
    assert whole(ends) == Outcome()


def test_bounds_are_ours_to_check(ends):
    with pytest.raises(BadRequest):
        ends.read(NBYTES - 100)
    with pytest.raises(BadRequest):
        ends.reader.post(ends.peer, copies([0], [0], [10], regions=(9, 0)))


def test_a_region_without_bytes_never_reaches_the_library(ends):
    with pytest.raises(ConfigError, match="empty"):
        ends.open("other", [MemoryRegion(id=0, address=ends.memory[0].regions[0].address, nbytes=0, writable=True)])
    assert not ends.mori.aborted


def test_a_refused_registration_or_a_missing_adapter_is_a_plain_error(ends):
    ends.mori.faults.refuse_registration = True
    with pytest.raises(ConfigError, match="ibv_reg_mr"):
        ends.open("other", ends.memory[0].regions)
    ends.mori.faults.no_adapter = True
    with pytest.raises(ConfigError, match="RDMA device"):
        ends.open("third", ends.memory[0].regions)


def test_the_source_is_gone(ends):
    ends.source.close()
    outcome = whole(ends)
    assert outcome.error and not outcome.proven


@pytest.mark.parametrize("blob", [b"", b"garbage", b"\x92\xc4\x01x\x90"])
def test_a_damaged_description_is_refused(ends, blob):
    with pytest.raises(TransferFailed):
        ends.reader.connect(blob, 1.0)


def test_a_disconnected_peer_takes_no_reads(ends):
    ends.reader.disconnect(ends.peer)
    ends.reader.disconnect(ends.peer)
    with pytest.raises(TransferFailed):
        ends.read(0)


def test_without_the_library_the_error_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "mori.io", None)
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(ConfigError, match="ROCm"):
        open_engine(EngineSpec(module="m", name="n"), [])


def test_reads_of_many_threads_keep_apart(ends):
    ends.mori.faults.pace_s = 0.0005
    tickets = [ends.read(at) for at in range(0, NBYTES, 4096)]
    end = time.monotonic() + 60
    while tickets and time.monotonic() < end:
        tickets = [t for t in tickets if ends.reader.wait(t, 0.01) is None]
    assert not tickets
    assert np.array_equal(ends.served, ends.landed)
