"""A transport over a native engine that misbehaves: what lands where, what is proven when, what is opened again."""

import logging
import os
import signal
import threading
import time
from functools import partial

import psutil
import pytest

from core.clock import SystemClock
from core.errors import Aborted, ConfigError, TransferFailed
from core.ids import LeaseId, TransferId, fresh_incarnation
from kv_transfer.api import Capabilities, OpState
from kv_transfer.backends.native_peer import StagedPeer
from kv_transfer.backends.native_transport import NativeTransport, Way, needs_shared
from kv_transfer.config import TransferConfig
from kv_transfer.memory import allocate, region_view
from kv_transfer.settings import TransportSettings
from tests.fakes.fake_native import FakeEngine
from tests.fakes.kv_ends import FOREVER, copies

PAGE, PAGES = 1 << 16, 16
SIZE = PAGE * PAGES
WHOLE = copies([0], [0], [SIZE])
LEASE = LeaseId(1)


class Plan:
    """The fake engine, on the reader's side as `reader_options` say (which may change under way)."""

    module = "tests.fakes.fake_native"
    capabilities = Capabilities(
        name="fake",
        version="1",
        max_records_per_op=64,
        max_bytes_per_op=1 << 20,
        max_ops_in_flight_per_peer=8,
        same_host_only=True,
        read_is_safe_for_source=True,
        cancel_is_fence=True,
        landing="staged",
    )

    def __init__(self, *, sidecar=False, direct=False, serve_sidecar=False, worse="", in_steps=False, **reader_options):
        self.reader_options = reader_options
        self._reach = Way("cma", sidecar, direct, reader_options, worse, in_steps)
        self._serve = Way("tcp", serve_sidecar)

    def serve(self, regions, config):
        if self._serve.sidecar:
            needs_shared(regions, "fake")
        return self._serve

    def reach(self, export, here, config):
        assert export.host == here
        return self._reach


class End:
    def __init__(self, plan, directory, guard=None, **settings):
        self.memory = allocate([SIZE], incarnation=fresh_incarnation(), directory=directory)
        self.news = threading.Event()
        config = TransferConfig(
            segment_directory=directory, landing_ring_bytes=4 * PAGE, landing_slot_bytes=PAGE, **settings
        )
        self.transport = NativeTransport(
            plan, TransportSettings(fresh_incarnation(), config), guard, SystemClock(), self.news.set
        )
        self.transport.register(self.memory.regions[0])

    @property
    def bytes(self):
        return region_view(self.memory.regions[0])

    def read(self, peer, records=WHOLE):
        return self.transport.submit(peer, records, TransferId("t"), LEASE, FOREVER)

    def begin(self, peer, records=WHOLE):
        """A read that the library has."""
        FakeEngine.posted.clear()
        op = self.read(peer, records)
        assert FakeEngine.posted.wait(60)
        return op

    def until(self, true, timeout_s=60.0):
        end = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < end, "it did not come"
            self.news.wait(0.05)

    def close(self):
        self.transport.destroy()
        self.memory.close()


@pytest.fixture
def ends(tmp_path):
    opened = []

    def make(plan, **settings):
        source, target = End(plan, str(tmp_path), guard=object()), End(plan, str(tmp_path), **settings)
        opened.extend((source, target))
        source.bytes[:] = 7
        return source, target

    yield make
    for one in opened:
        one.close()


def healed(plan, ends, **settings):
    """Ends that are connected while the engine is well; it goes wrong from here on."""
    options, plan.reader_options = dict(plan.reader_options), plan.reader_options
    plan.reader_options.clear()
    source, target = ends(plan, **settings)
    peer = target.transport.connect(source.transport.export(), 10.0)
    plan.reader_options |= options
    return source, target, peer


def test_a_library_that_moves_bytes_inside_its_call_writes_the_pages_in_steps(ends):
    source, target = ends(Plan(direct=True, in_steps=True, at_once=""), step_bytes=PAGE)
    peer = target.transport.connect(source.transport.export(), 10.0)
    FakeEngine.sizes.clear()
    op = target.read(peer)
    target.until(lambda: target.transport.quiesced(op))
    assert op.state is OpState.DONE
    assert (target.bytes == 7).all()
    assert FakeEngine.sizes == [PAGE] * PAGES
    assert target.transport.statistics()["worse_ways"] == 0


def test_a_library_that_does_not_do_so_after_all_gets_the_ring(ends, caplog):
    """Whoever waits for the end of a read that goes on by itself has no proof in a bounded time."""
    source, target = ends(Plan(direct=True, in_steps=True, late_s="0.05"))
    with caplog.at_level(logging.WARNING):
        peer = target.transport.connect(source.transport.export(), 10.0)
    assert "does not read that memory directly" in caplog.text
    assert isinstance(peer, StagedPeer)
    assert target.transport.statistics()["worse_ways"] == 1


def test_the_next_read_is_under_way_before_this_one_is_copied_out(ends):
    plan = Plan(late_s="0.3")
    source, target, peer = healed(plan, ends)
    first, second = target.begin(peer, copies([0], [0], [PAGE])), target.read(peer, copies([5], [PAGE], [100]))
    FakeEngine.sizes.clear()
    target.until(lambda: 100 in FakeEngine.sizes)
    assert not target.transport.quiesced(first)
    target.until(lambda: target.transport.quiesced(second))
    assert (first.state, second.state) == (OpState.DONE, OpState.DONE)
    assert FakeEngine.sizes == [100], "it was read twice"
    assert (target.bytes[: PAGE + 100] == 7).all()
    assert not target.bytes[PAGE + 100 :].any()


def test_a_read_cancelled_before_its_turn_writes_nothing_and_its_slot_comes_back(ends):
    plan = Plan(late_s="0.2")
    source, target, peer = healed(plan, ends)
    for _ in range(6):  # more often than there are slots
        FakeEngine.sizes.clear()
        first, second = target.begin(peer, copies([0], [0], [PAGE])), target.read(peer, copies([5], [PAGE], [100]))
        target.until(lambda: 100 in FakeEngine.sizes)
        target.transport.cancel(second)
        assert target.transport.quiesced(second)
        target.until(partial(target.transport.quiesced, first))
        assert first.state is OpState.DONE
    assert not target.bytes[PAGE:].any()
    assert target.transport.statistics()["engine_restarts"] == 0


def test_a_cancelled_read_that_never_ends_frees_the_pages_at_once_and_keeps_its_slots(ends):
    source, target, peer = healed(Plan(hang=""), ends)
    op = target.begin(peer)
    target.transport.cancel(op)
    target.until(lambda: target.transport.quiesced(op))
    assert isinstance(op.error, Aborted)
    assert not target.bytes.any()


def test_a_read_that_goes_on_after_its_cancellation_dirties_no_page(ends):
    source, target, peer = healed(Plan(late_s="0.5"), ends)
    many = copies([i * 1024 for i in range(64)], [i * 1024 for i in range(64)], [1024] * 64)
    op = target.begin(peer, many)
    target.transport.cancel(op)
    target.until(lambda: target.transport.quiesced(op))
    target.bytes[:] = 201
    time.sleep(0.7)  # nothing to wait for: the point is that nothing comes
    assert (target.bytes == 201).all()


def test_a_ring_without_proof_is_replaced_by_a_fence_and_reads_go_on(ends):
    plan = Plan(hang="")
    source, target, peer = healed(plan, ends, progress_timeout_s=0.1)
    op = target.read(peer)
    target.until(lambda: target.transport.quiesced(op))
    assert "no byte came" in str(op.error)
    second = target.read(peer)
    target.until(lambda: target.transport.quiesced(second))
    plan.reader_options.clear()

    def read_again():
        again = target.read(peer)
        target.until(lambda: target.transport.quiesced(again))
        return again.state is OpState.DONE

    target.until(read_again)
    assert target.transport.statistics()["engine_restarts"] == 1
    assert (target.bytes == 7).all()


def test_an_unproven_failure_costs_slots_until_the_fence(ends):
    plan = Plan(unproven="")
    source, target, peer = healed(plan, ends)
    states = []

    def fails_until_fenced():
        op = target.read(peer, copies([0], [0], [100]))
        target.until(lambda: target.transport.quiesced(op))
        states.append(op.state)
        if target.transport.statistics()["engine_restarts"]:
            plan.reader_options.clear()
        return op.state is OpState.DONE

    # A new engine has taken the old options: it is fenced once more.
    target.until(fails_until_fenced)
    assert states.count(OpState.FAILED) >= 3
    assert target.transport.statistics()["engine_restarts"] >= 1


def test_a_read_that_arrived_at_a_second_attempt_is_whole_and_its_slots_wait_for_the_fence(ends):
    """Mooncake's retry in place: what the first attempt left behind may write the slots again, never the pages."""
    plan = Plan(again="")
    source, target, peer = healed(plan, ends)
    states = []

    def reads_until_fenced():
        op = target.read(peer, copies([0], [0], [100]))
        target.until(lambda: target.transport.quiesced(op))
        states.append(op.state)
        return target.transport.statistics()["engine_restarts"] >= 1

    target.until(reads_until_fenced)
    assert states.count(OpState.DONE) >= 3, "a ring of four slots gives up half of them before it is replaced"
    assert (target.bytes[:100] == 7).all()


def test_a_direct_read_stays_unproven_until_the_engine_is_destroyed(ends):
    source, target, peer = healed(Plan(direct=True, hang=""), ends)
    op = target.begin(peer)
    target.transport.cancel(op)
    target.until(lambda: op.state is OpState.UNPROVEN)
    assert not target.transport.quiesced(op)
    assert target.transport.poll() == [op]
    target.transport.destroy()
    assert target.transport.quiesced(op)


def test_a_direct_read_without_proof_is_fenced_at_once(ends):
    source, target, peer = healed(Plan(direct=True, unproven="", late_s="0.2"), ends)
    op = target.read(peer)
    target.until(lambda: target.transport.quiesced(op))
    assert op.state is OpState.FAILED
    target.bytes[:] = 201
    time.sleep(0.4)  # nothing to wait for: the point is that nothing comes
    assert (target.bytes == 201).all()


def test_a_crashed_sidecar_costs_its_reads_and_the_next_ones_go_through_another(ends):
    plan = Plan(sidecar=True, crash="")
    source, target, peer = healed(plan, ends)
    first = target.read(peer)
    target.until(lambda: target.transport.quiesced(first))
    # Its options were taken when it was opened, so that one was well.
    assert first.state is OpState.DONE
    child = next(c for c in psutil.Process().children() if "sidecar_child" in " ".join(c.cmdline()))
    os.kill(child.pid, signal.SIGSTOP)
    op = target.read(peer)
    os.kill(child.pid, signal.SIGKILL)
    target.until(lambda: target.transport.quiesced(op))
    assert op.state is OpState.FAILED
    # What it says depends on whether the read had reached the child before it was killed.
    assert "status -9" in str(op.error) or "is opened again" in str(op.error)
    plan.reader_options.clear()

    def reads_again():
        again = target.read(peer)
        target.until(lambda: target.transport.quiesced(again))
        return again.state is OpState.DONE

    target.until(reads_again)
    assert target.transport.statistics()["engine_restarts"] == 1


def test_a_serving_sidecar_that_died_is_opened_again_under_another_description(ends):
    plan = Plan(serve_sidecar=True)
    source, target, peer = healed(plan, ends)
    before = source.transport.export().blob
    child = next(c for c in psutil.Process().children() if "sidecar_child" in " ".join(c.cmdline()))
    child.kill()

    def served_again():
        try:
            return source.transport.export().blob != before
        except TransferFailed:
            return False

    source.until(served_again)
    assert source.transport.statistics()["engine_restarts"] == 1
    op = target.read(target.transport.connect(source.transport.export(), 10.0))
    target.until(lambda: target.transport.quiesced(op))
    assert op.state is OpState.DONE
    with pytest.raises(TransferFailed):
        stale = target.read(peer)
        target.until(lambda: target.transport.quiesced(stale))
        raise stale.error


def test_a_slower_way_is_told_aloud_and_counted(ends, caplog):
    with caplog.at_level(logging.INFO):
        healed(Plan(worse="seccomp denies it"), ends)[1].transport.statistics()
    spoken = [record for record in caplog.records if "seccomp denies it" in record.getMessage()]
    assert [record.levelname for record in spoken] == ["WARNING"]


def test_private_memory_is_not_served_by_a_sidecar(tmp_path):
    memory = allocate([4096], incarnation=fresh_incarnation())
    with pytest.raises(ConfigError, match="shared memory"):
        needs_shared(memory.regions, "fake")
    memory.close()
