"""No byte of a page changes while it is free or somebody else's, no page leaks, nothing wrong is ever committed.

A whole source and destination under random scripts of prompts, chunks, reads that move byte by byte, aborts, lapsed leases,
broken links, reuse of pages and fences. The oracle is the memory and the fake hosts. Planted mutants must be caught.
"""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kv_transfer.lease
import kv_transfer.pull
import kv_transfer.quarantine
from core.clock import ManualClock, SystemClock
from core.errors import TandemError
from kv_transfer.destination import Destination
from kv_transfer.exchange import Exchange
from kv_transfer.factory import TransportFactory
from kv_transfer.local_link import LocalDialer
from kv_transfer.settings import TransportSettings
from kv_transfer.source import Source
from tests.fakes.kv_pair import ADDRESS, FINGERPRINT, quick
from tests.fakes.kv_pools import FakeDestinationHost, FakeSourceHost, Pool, make_layout, make_request
from tests.fakes.manual_transport import ManualOpener, ManualTransport

FREE = 0xEE
WEIGHTS = {
    "pull": 16, "compute": 12, "finish": 16, "advance": 60, "cancel": 4, "unproven": 3, "stop": 3, "end": 6,
    "lapse": 1, "cut": 1, "fence": 1, "reuse": 1,
}  # fmt: skip
ACTIONS = [action for action, weight in WEIGHTS.items() for _ in range(weight)]
scripts = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7)), max_size=80)


class Inline(ThreadPoolExecutor):
    """Runs at once: the example is the same at every run."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class WatchedPool(Pool):
    """Marks free pages and finds out when somebody writes them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for page in self.free:
            self._mark(page)

    def give(self, pages):
        super().give(pages)
        for page in pages:
            self._mark(page)

    def _mark(self, page):
        for name in self.names(paged=True):
            self.bytes_of(name, page)[:] = FREE

    def check(self):
        for page in self.free:
            for name in self.names(paged=True):
                assert (self.bytes_of(name, page) == FREE).all(), f"page {page} was written while it was free"


class World:
    """Both sides, and one method per action."""

    def __init__(self):
        layout = make_layout(num_pages=40, page_bytes=24, index_bytes=8)
        self.theirs, self.ours = WatchedPool(layout, seed=1), WatchedPool(layout, seed=2)
        self.clock = ManualClock()
        self.source_host, self.host = FakeSourceHost(self.theirs), FakeDestinationHost(self.ours)
        self.dialer = LocalDialer()
        config = quick(
            transports=("loopback",),
            sweep_interval_s=3600.0,
            drain_timeout_s=0.01,
            breaker_failures=10**6,
            staging_rows=2,
        )
        exchange = Exchange()
        self.source = Source(
            config=config, incarnation=self.theirs.incarnation, fingerprint=FINGERPRINT, layout=layout,
            regions=self.theirs.memory.regions, host=self.source_host, clock=self.clock,
            opener=TransportFactory(
                TransportSettings(self.theirs.incarnation, config, exchange), self.theirs.memory.regions, self.clock
            ),
        )  # fmt: skip
        self.source_host.source = self.source
        self.opener = ManualOpener(self.ours.memory.regions, self.theirs.memory.regions)
        self.destination = Destination(
            config=config, incarnation=self.ours.incarnation, fingerprint=FINGERPRINT, layout=layout,
            regions=self.ours.memory.regions, host=self.host, dialer=self.dialer, opener=self.opener,
            clock=SystemClock(),
        )  # fmt: skip
        self.pulls: dict[int, tuple[asyncio.Task, object]] = {}
        self.committed: dict[int, object] = {}
        self.next_seq = 0
        self.num_commits = 0

    async def settle(self):
        """Let everything happen that needs no further word from the script, and look at the memory."""
        for _ in range(25):
            await asyncio.sleep(0)
        for seq, (task, request) in list(self.pulls.items()):
            if task.done():
                del self.pulls[seq]
                if not task.cancelled() and task.exception() is None:
                    self.host.assert_landed(seq, request, row=seq % 4)
                    self.committed[seq] = request
                    self.num_commits += 1
                elif not task.cancelled():
                    assert isinstance(task.exception(), TandemError), task.exception()
        for seq, request in self.committed.items():
            self.host.assert_landed_pages(seq, request)
        self.ours.check()
        self.theirs.check()

    def pull(self, n):
        if len(self.pulls) >= 3 or len(self.ours.free) < 12 or len(self.theirs.free) < 12:
            return
        self.next_seq += 1
        request = make_request(10 + 13 * (n % 4), f"req-{self.next_seq}")
        work = self.destination.pull(
            request=request, seq=self.next_seq, row=self.next_seq % 4, prefix_tokens=0, address=ADDRESS,
            incarnation=None, timeout_s=3600, on_first=lambda first: None,
        )  # fmt: skip
        self.pulls[self.next_seq] = (asyncio.ensure_future(work), request)

    def _prefill(self, n):
        running = list(self.source_host.prefills.values())
        return running[n % len(running)] if running else None

    def compute(self, n):
        prefill = self._prefill(n)
        if prefill is not None and prefill.done < len(prefill.request.token_ids):
            self.source_host.compute(prefill, min(prefill.done + 16, len(prefill.request.token_ids)))

    def finish(self, n):
        prefill = self._prefill(n)
        if prefill is not None and prefill.row >= 0:
            if prefill.done < len(prefill.request.token_ids):
                self.source_host.compute(prefill, len(prefill.request.token_ids))
            if prefill.seq in self.source_host.prefills:
                self.source_host.finish(prefill)

    def _work(self, n):
        works = self.opener.works
        return works[n % len(works)] if works else None

    def advance(self, n):
        work = self._work(n)
        if work is not None:
            next(t for t in self.opener.opened if work in t.open).advance(work, 1 + n % 3)

    def unproven(self, n):
        work = self._work(n)
        if work is not None:
            next(t for t in self.opener.opened if work in t.open).fail_without_proof(work)

    def stop(self, n):
        work = self._work(n)
        if work is not None:
            next(t for t in self.opener.opened if work in t.open).stop(work)

    def cancel(self, n):
        if self.pulls:
            list(self.pulls.values())[n % len(self.pulls)][0].cancel()

    def lapse(self, n):
        """Time passes at the source without a heartbeat; sometimes the reaper comes late."""
        self.clock.advance(100)
        if n % 2:
            self.source._desk.expire()

    def reuse(self, n):
        """The source's engine reuses a page of a prompt although it is leased: a bug that validation must catch."""
        prefill = self._prefill(n)
        if prefill is not None and prefill.done:
            page = prefill.pages[n % len(prefill.pages)]
            self.theirs.epochs[page] += 1
            for name in self.theirs.names(paged=True):
                self.theirs.bytes_of(name, page)[:] = 0x55

    def cut(self, n):
        if self.dialer.links:
            self.dialer.links[-1].cut(None)

    def end(self, n):
        if self.committed:
            seq = list(self.committed)[n % len(self.committed)]
            del self.committed[seq]
            self.host.release(seq)

    def fence(self, n):
        """The transport is destroyed under everything (budget exceeded, shutdown)."""
        book = self.destination._book
        if n == 0:
            for reader in list(book._readers.values()):
                self.fencing = asyncio.ensure_future(book._fence(reader))

    async def finish_all(self):
        """Every read ends, every pull ends: then nothing may be missing."""
        for _ in range(200):
            for work in self.opener.works:
                next(t for t in self.opener.opened if work in t.open).advance(work, 1)
            for prefill in list(self.source_host.prefills.values()):
                self.source_host.stop(prefill.seq)
                self.source.failed(prefill.seq, TandemError("the end"))
            await self.settle()
            if not self.pulls and not self.opener.works:
                break
        assert not self.pulls
        for seq in list(self.committed):
            del self.committed[seq]
            self.host.release(seq)
        for reader in self.destination._book._readers.values():
            reader.tick()
        assert self.host.is_whole, "pages leaked at the destination"
        assert len(self.theirs.free) == 39, "pages leaked at the source"
        assert self.source.num_leases == 0
        statistics = self.destination.statistics()
        assert statistics["open_ops"] == statistics["unproven_pages"] == statistics["transfers"] == 0


@asynccontextmanager
async def open_world():
    asyncio.get_running_loop().set_default_executor(Inline())
    world = World()
    await world.source.start()
    world.dialer.serve(ADDRESS, world.source)
    try:
        yield world
    finally:
        for task, _ in world.pulls.values():
            task.cancel()
        await asyncio.gather(*(task for task, _ in world.pulls.values()), return_exceptions=True)
        await world.destination.close()
        await world.source.close()
        world.theirs.memory.close()
        world.ours.memory.close()


async def play(script):
    async with open_world() as world:
        for action, n in script:
            getattr(world, action)(n)
            await world.settle()
        await world.finish_all()
        return world.num_commits


def random_script(rng, weights):
    actions = [action for action, weight in weights.items() for _ in range(weight)]
    return [(actions[rng.integers(len(actions))], int(rng.integers(8))) for _ in range(80)]


LIFE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@LIFE
@given(scripts)
def test_pages_are_safe_under_every_script(script):
    asyncio.run(play(script))


def test_scripts_reach_commits_and_failures_alike():
    """Not everything fails, or the test above would prove nothing."""
    rng = np.random.default_rng(3)
    commits = [asyncio.run(play(random_script(rng, WEIGHTS))) for _ in range(7)]
    assert sum(commits) >= 10


def free_open_pages(monkeypatch):
    """Pages go home at once, as if no read could still write them."""
    monkeypatch.setattr(kv_transfer.reader.Reader, "abandon", lambda self, group: False)


def believe_failures(monkeypatch):
    """A failed read counts as over."""
    monkeypatch.setattr(ManualTransport, "quiesced", lambda self, op: op.state.value != "posted")


def believe_cancels(monkeypatch):
    """A cancelled read counts as over."""

    def quiesced(self, op):
        return not any(work.op is op and not work.cancelled for work in self.open)

    monkeypatch.setattr(ManualTransport, "quiesced", quiesced)


def never_sweep(monkeypatch):
    """Quarantine that nobody empties."""
    monkeypatch.setattr(kv_transfer.quarantine.Quarantine, "sweep", lambda self, transport: 0)


def ignore_the_lease(monkeypatch):
    """The source's word at release is always good."""
    monkeypatch.setattr(kv_transfer.lease.LeaseTable, "end", lambda self, lease: (self._forget(lease), True)[1])
    monkeypatch.setattr(FakeSourceHost, "epochs_unchanged", _always)


def _always(self, seq):
    return True


def commit_early(monkeypatch):
    """Release goes out before the reads are over."""

    async def landed(self, group):
        return None

    monkeypatch.setattr(kv_transfer.reader.Reader, "landed", landed)


def forget_the_drop(monkeypatch):
    """A failed pull keeps its pages."""
    monkeypatch.setattr(FakeDestinationHost, "drop", lambda self, seq, open_pages: self.dropped.append(seq))


MUTANTS = {
    free_open_pages: {"cancel": 20},
    believe_failures: {"unproven": 30, "cut": 0, "lapse": 0, "fence": 0},
    believe_cancels: {"cancel": 20, "fence": 0},
    never_sweep: {"cancel": 20},
    ignore_the_lease: {"reuse": 20, "cancel": 0, "cut": 0, "lapse": 0, "fence": 0, "unproven": 0},
    commit_early: {"cancel": 0},
    forget_the_drop: {"cancel": 20},
}
"""Each with what its scripts have more or less of, so that it is found soon."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_mutants_are_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    rng = np.random.default_rng(7)
    for _ in range(100):
        try:
            asyncio.run(play(random_script(rng, WEIGHTS | MUTANTS[mutant])))
        except AssertionError:
            return
    pytest.fail(f"the mutant {mutant.__name__} was not caught")
