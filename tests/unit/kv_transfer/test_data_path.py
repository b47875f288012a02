"""A read has failed: is it the read, or the path? Only a broken path costs the session, and the next one is made anew."""

import asyncio
import contextlib

import psutil
import pytest

from core.errors import NoCapacity, TandemError, TransferFailed
from kv_transfer.backends.native_peer import DirectPeer
from kv_transfer.exchange import Exchange
from tests.fakes.kv_pair import open_pair, quick
from tests.fakes.kv_pools import make_request


class Trouble:
    """Fails reads of the loopback transport: those of hand-overs, or all."""

    def __init__(self, *, probes: bool) -> None:
        self.on = True
        self._probes = probes

    def __call__(self, op, landed) -> None:
        if self.on and (self._probes or op.transfer != "probe"):
            raise TransferFailed("injected")


async def proven_again(pair) -> None:
    """Wait until the doubt is over: nobody else waits for it."""
    async with asyncio.timeout(30):
        while any(session.doubted for session in pair.destination._book._sessions.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_failed_read_on_a_path_that_works_keeps_the_session(tmp_path):
    trouble = Trouble(probes=False)
    async with open_pair("loopback", str(tmp_path), exchange=Exchange(trouble)) as pair:
        with pytest.raises(TransferFailed, match="injected"):
            await pair.pull(make_request(64))
        await proven_again(pair)
        trouble.on = False
        await pair.pull(make_request(64, "req-2"), seq=2)
        assert len(pair.dialer.links) == 1


async def test_a_path_that_is_broken_ends_the_session_and_the_next_hand_over_shakes_hands_anew(tmp_path):
    trouble = Trouble(probes=True)
    trouble.on = False
    async with open_pair("loopback", str(tmp_path), exchange=Exchange(trouble)) as pair:
        await pair.pull(make_request(64))
        trouble.on = True
        with pytest.raises(TransferFailed, match="injected"):
            await pair.pull(make_request(64, "req-2"), seq=2)
        async with asyncio.timeout(30):
            while pair.destination.statistics()["sessions"]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        trouble.on = False
        await pair.pull(make_request(64, "req-3"), seq=3)
        assert len(pair.dialer.links) == 2


async def test_a_killed_nixl_sidecar_of_the_source_costs_single_hand_overs_only(tmp_path):
    """With the real library: the source's process lives on, serves from another engine, and the destination finds it."""
    async with open_pair("nixl", str(tmp_path), config=quick(breaker_min_s=0.05, breaker_max_s=0.1)) as pair:
        await pair.pull(make_request(64))
        child = next(c for c in psutil.Process().children() if "sidecar_child" in " ".join(c.cmdline()))
        child.kill()
        # Until it has ended, which takes a moment on busy cores, its memory can be read.
        with contextlib.suppress(psutil.NoSuchProcess):
            while child.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        seq = 2
        async with asyncio.timeout(40):
            while True:
                try:
                    await pair.pull(make_request(64, f"req-{seq}"), seq=seq)
                    break
                except NoCapacity as error:
                    await asyncio.sleep(error.retry_after_s or 0.05)
                except TandemError:
                    await asyncio.sleep(0.05)
                seq += 1
        # Even the first may find the new engine, if the death was noticed before it began.
        assert pair.source.statistics()["engine_restarts_nixl"] == 1, "the dead engine served a hand-over"
        await pair.settled()


async def test_nixl_reads_the_memory_of_a_process_on_this_host_directly(tmp_path):
    """Not through sockets, which UCX takes in silence, and without a detour over the ring."""
    async with open_pair("nixl", str(tmp_path)) as pair:
        await pair.pull(make_request(64))
        (session,) = pair.destination._book._sessions.values()
        assert isinstance(session.peer, DirectPeer)
        assert pair.destination.statistics()["peers_direct_nixl"] == 1
        assert pair.destination.statistics()["worse_ways_nixl"] == 0
