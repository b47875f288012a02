"""Whole hand-overs between a source and a destination in one process, over every embedded transport, and how they fail."""

import asyncio
import threading

import numpy as np
import pytest

from core.clock import ManualClock
from core.errors import (
    Aborted,
    BadRequest,
    ChecksumMismatch,
    DeadlineExceeded,
    Draining,
    InvariantError,
    LeaseLost,
    NamespaceMismatch,
    NoCapacity,
    TransferFailed,
    WorkerLost,
)
from core.handover import Stale
from core.ids import fresh_incarnation
from core.request import Floors, with_floors
from kv_transfer.exchange import Exchange
from kv_transfer.reader import Reader
from tests.fakes.kv_pair import ADDRESS, open_pair, quick
from tests.fakes.kv_pools import make_layout, make_request

TRANSPORTS = ["loopback", "shm", "tcp"]
PAGE_AND_INDEX = 1024 + 96
ROW = 160 + 48


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


class Gate:
    """Holds reads of hand-overs by the loopback transport until it is opened."""

    def __init__(self, only=lambda op: True) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.only = only
        self.error = None

    def __call__(self, op, landed):
        if self.only(op) and op.transfer != "probe":
            self.reached.set()
            self.open.wait(60)
            if self.error is not None:
                raise self.error


async def until(condition):
    """Poll: what is waited for has no event of its own."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_source_behind_a_shorter_hit_sends_what_our_prefix_has_of_another_kind(transport, directory):
    async with open_pair(transport, directory) as pair:
        pair.source_host.floors = Floors(encoder_floor=16, decoder_floor=60, hits=(32,))
        request = make_request(100)
        pulled = await pair.pull(request, prefix_tokens=64)
        pair.host.assert_landed(1, request, row=1, first_page=2)
        assert pulled.first.floors == pair.source_host.floors
        assert pair.firsts[0].floors == pair.source_host.floors


@pytest.mark.parametrize("prefix", [16, 32])
async def test_a_prefix_that_lies_before_the_sources_hit_is_not_sent(prefix, transport, directory):
    async with open_pair(transport, directory) as pair:
        pair.source_host.floors = Floors(encoder_floor=16, decoder_floor=60, hits=(32, 48))
        request = make_request(100)
        await pair.pull(request, prefix_tokens=prefix)
        pair.host.assert_landed(1, request, row=1, first_page=prefix // 16)


async def test_a_request_with_fixed_floors_keeps_its_whole_prefix(transport, directory):
    async with open_pair(transport, directory) as pair:
        pair.source_host.floors = Floors(encoder_floor=16, decoder_floor=60, hits=(32,))
        request = with_floors(make_request(100), pair.source_host.floors)
        await pair.pull(request, prefix_tokens=64)
        pair.host.assert_landed(1, request, row=1, first_page=4)


async def test_a_pull_brings_every_page_and_the_row(transport, directory):
    async with open_pair(transport, directory) as pair:
        request = make_request(200)
        pulled = await pair.pull(request)
        pair.host.assert_landed(1, request, row=1)
        assert pulled.num_tokens == 200
        assert pulled.chunks == 4
        assert pulled.first.tokens == (777,)
        assert pair.firsts == [pulled.first]
        assert pulled.bytes_pulled == 13 * PAGE_AND_INDEX + ROW
        assert pair.source.statistics()["bytes_handed_over"] == pulled.bytes_pulled
        assert pair.bytes_landed == pulled.bytes_pulled
        await pair.settled()
        assert pair.host.dropped == []
        assert pair.source_host.pool.free.__len__() == 63


async def test_many_pulls_at_once_do_not_mix(transport, directory):
    layouts = {
        "source_layout": make_layout(num_pages=256, num_rows=16),
        "target_layout": make_layout(num_pages=256, num_rows=16),
    }
    async with open_pair(transport, directory, config=quick(staging_rows=3), **layouts) as pair:
        requests = [make_request(20 + 37 * i, f"req-{i}") for i in range(12)]
        await asyncio.gather(*(pair.pull(r, seq=i, row=i) for i, r in enumerate(requests)))
        for i, request in enumerate(requests):
            pair.host.assert_landed(i, request, row=i)
            pair.host.release(i)
        await pair.settled()
        assert pair.host.is_whole


async def test_a_model_without_row_state_needs_no_staging(transport, directory):
    layout = make_layout(num_pages=64, rows=False)
    async with open_pair(transport, directory, source_layout=layout, target_layout=layout) as pair:
        request = make_request(100)
        pulled = await pair.pull(request)
        pair.host.assert_landed(1, request, row=1)
        assert pulled.bytes_pulled == 7 * PAGE_AND_INDEX


@pytest.mark.parametrize("prefix", [0, 16, 48, 96])
async def test_pages_that_the_destination_holds_are_not_moved(transport, directory, prefix):
    async with open_pair(transport, directory) as pair:
        request = make_request(100)
        pulled = await pair.pull(request, prefix_tokens=prefix)
        pair.host.assert_landed(1, request, row=1, first_page=prefix // 16)
        assert pulled.bytes_pulled == (7 - prefix // 16) * PAGE_AND_INDEX + ROW
        assert pair.source.statistics()["bytes_handed_over"] == pulled.bytes_pulled


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 40, 1000])
async def test_chunks_of_any_size_give_the_same_pages(directory, chunk):
    async with open_pair("loopback", directory, chunk_tokens=chunk) as pair:
        request = make_request(77)
        pulled = await pair.pull(request)
        pair.host.assert_landed(1, request, row=1)
        assert pulled.bytes_pulled == 5 * PAGE_AND_INDEX + ROW


async def test_digests_are_checked_when_asked_for(transport, directory):
    async with open_pair(transport, directory, config=quick(digests=True)) as pair:
        request = make_request(200)
        await pair.pull(request)
        pair.host.assert_landed(1, request, row=1)


@pytest.mark.parametrize("name", ["kv", "index", "ring", "state"])
async def test_a_flipped_byte_is_found_by_the_digests(directory, name):
    async with open_pair("shm", directory, config=quick(digests=True), computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(40)))
        prefill = await pair.source_host.started.get()
        pair.source_host.compute(prefill, 40)
        paged = name in ("kv", "index")
        # The source flips a byte after the digest and before the read: what a torn or stale read looks like.
        pair.host.room.clear()
        pair.source_host.finish(prefill)
        await until(lambda: pair.firsts)
        pair.source_host.pool.bytes_of(name, prefill.pages[1] if paged else prefill.row)[5] ^= 0xFF
        pair.host.room.set()
        with pytest.raises(ChecksumMismatch):
            await pulling
        await pair.settled()
        assert pair.host.dropped == [1]
        assert pair.host.is_whole


async def test_without_digests_a_flipped_byte_goes_unseen(directory):
    """Negative control of the test above."""
    async with open_pair("shm", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(40)))
        prefill = await pair.source_host.started.get()
        pair.host.room.clear()
        pair.source_host.compute(prefill, 40)
        pair.source_host.finish(prefill)
        await until(lambda: pair.firsts)
        pair.source_host.pool.bytes_of("kv", prefill.pages[1])[5] ^= 0xFF
        pair.host.room.set()
        await pulling


async def test_the_first_token_is_told_before_the_rest_is_read(directory):
    gate = Gate()
    async with open_pair("loopback", directory, exchange=Exchange(gate)) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(100)))
        await until(lambda: pair.firsts)
        assert not pulling.done()
        assert pair.bytes_landed == 0
        gate.open.set()
        await pulling


async def test_pages_are_read_while_the_source_computes_the_next_chunk(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        prefill = await pair.source_host.started.get()
        pair.source_host.compute(prefill, 32)
        await until(lambda: pair.bytes_landed == 2 * PAGE_AND_INDEX)
        assert not pair.firsts
        pair.source_host.compute(prefill, 64)
        pair.source_host.finish(prefill)
        await pulling


async def test_without_overlap_nothing_is_read_before_the_final(directory):
    async with open_pair("loopback", directory, computing=False, config=quick(pull_chunks=False)) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        prefill = await pair.source_host.started.get()
        await asyncio.sleep(0)
        pair.source_host.compute(prefill, 48)
        await asyncio.sleep(0.02)  # nothing to wait for: the point is that nothing is read
        assert pair.bytes_landed == 0
        pair.source_host.compute(prefill, 64)
        pair.source_host.finish(prefill)
        await pulling
        pair.host.assert_landed(1, make_request(64), row=1)


async def test_pages_are_allocated_only_when_a_chunk_is_ready(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        prefill = await pair.source_host.started.get()
        assert pair.host.landings == {}
        pair.source_host.compute(prefill, 16)
        await until(lambda: 1 in pair.host.landings)
        assert len(pair.host.landings[1].pages) == 1
        pair.source_host.compute(prefill, 64)
        pair.source_host.finish(prefill)
        await pulling


async def test_a_finish_at_the_first_token_is_passed_on(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(20)))
        prefill = await pair.source_host.started.get()
        pair.source_host.compute(prefill, 20)
        pair.source_host.finish(prefill, finish="stop")
        assert (await pulling).first.finish == "stop"


@pytest.mark.parametrize("error", [NoCapacity("full", retry_after_s=2.0), BadRequest("no"), Draining("going")])
async def test_what_the_source_refuses_is_raised_as_its_own_error(directory, error):
    async with open_pair("loopback", directory) as pair:
        pair.source_host.refuse = error
        with pytest.raises(type(error), match=error.message) as caught:
            await pair.pull(make_request(20))
        assert caught.value.retry_after_s == error.retry_after_s
        assert pair.host.dropped == [1]
        await pair.settled()


async def test_a_draining_source_refuses_new_hand_overs_and_finishes_old_ones(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        old = asyncio.create_task(pair.pull(make_request(20), seq=1))
        prefill = await pair.source_host.started.get()
        pair.source.drain()
        with pytest.raises(Draining):
            await pair.pull(make_request(20, "req-2"), seq=2)
        pair.source_host.compute(prefill, 20)
        pair.source_host.finish(prefill)
        await old


async def test_a_failed_prefill_is_raised_with_its_code(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(40)))
        prefill = await pair.source_host.started.get()
        pair.source_host.compute(prefill, 16)
        pair.source.failed(prefill.seq, NoCapacity("no pages left"))
        with pytest.raises(NoCapacity):
            await pulling
        await pair.settled()
        assert pair.host.is_whole
        assert pair.source_host.stopped == [prefill.seq]


async def test_the_sources_own_bug_is_only_a_failed_transfer_here(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(40)))
        prefill = await pair.source_host.started.get()
        pair.source.failed(prefill.seq, InvariantError("broken"))
        with pytest.raises(TransferFailed):
            await pulling


async def test_nobody_at_the_address_is_a_lost_worker(directory):
    async with open_pair("loopback", directory) as pair:
        with pytest.raises(WorkerLost):
            await pair.pull(make_request(20), address="nowhere:1")
        assert pair.host.dropped == [1]


async def test_another_incarnation_at_the_address_is_a_lost_worker(directory):
    async with open_pair("loopback", directory) as pair:
        with pytest.raises(WorkerLost, match="restarted"):
            await pair.pull(make_request(20), incarnation=fresh_incarnation())
        await pair.pull(make_request(20), seq=2, incarnation=pair.source_host.pool.incarnation)


async def test_a_link_that_breaks_before_the_final_is_a_lost_worker(transport, directory):
    async with open_pair(transport, directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        prefill = await pair.source_host.started.get()
        pair.source_host.compute(prefill, 32)
        await until(lambda: 1 in pair.host.landings)
        pair.dialer.links[0].cut(None)
        with pytest.raises(WorkerLost):
            await pulling
        assert not pair.firsts
        await pair.settled()
        assert pair.host.is_whole
        assert pair.source_host.stopped == [prefill.seq]
        # The next pull dials anew.
        again = asyncio.create_task(pair.pull(make_request(16, "req-2"), seq=2))
        prefill = await pair.source_host.started.get()
        pair.source_host.compute(prefill, 16)
        pair.source_host.finish(prefill)
        await again
        assert len(pair.dialer.links) == 2


async def test_a_link_that_breaks_after_the_final_never_commits(directory):
    gate = Gate()
    async with open_pair("loopback", directory, exchange=Exchange(gate)) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        await until(lambda: pair.firsts)
        pair.dialer.links[0].cut(None)
        with pytest.raises(WorkerLost):
            await pulling
        assert pair.host.dropped == [1]
        gate.open.set()
        await pair.settled()
        assert pair.host.is_whole


async def test_a_lease_that_lapsed_is_never_committed(directory):
    clock = ManualClock()
    async with open_pair("shm", directory, source_clock=clock, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(32)))
        prefill = await pair.source_host.started.get()
        pair.host.room.clear()
        pair.source_host.compute(prefill, 32)
        pair.source_host.finish(prefill)
        await until(lambda: pair.firsts)
        clock.advance(1000)
        pair.host.room.set()
        with pytest.raises(LeaseLost):
            await pulling
        await pair.settled()
        assert pair.host.is_whole


async def test_pages_that_were_reused_under_the_lease_are_never_committed(directory):
    async with open_pair("shm", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(32)))
        prefill = await pair.source_host.started.get()
        pair.source_host.compute(prefill, 32)
        pair.source_host.pool.epochs[prefill.pages[0]] += 1
        pair.source_host.finish(prefill)
        with pytest.raises(LeaseLost):
            await pulling
        assert pair.source.statistics()["releases_invalid"] == 1
        assert pair.host.is_whole


async def test_heartbeats_keep_a_lease_alive_while_the_destination_waits_for_room(directory):
    config = quick(lease_ttl_s=1.0, orphan_ttl_s=1.0)
    async with open_pair("loopback", directory, config=config) as pair:
        pair.host.room.clear()
        pulling = asyncio.create_task(pair.pull(make_request(32)))
        await until(lambda: pair.firsts)
        await asyncio.sleep(2.5)  # several lives of the lease
        pair.host.room.set()
        await pulling


async def test_a_lease_dies_without_heartbeats(directory):
    """Negative control of the test above."""
    config = quick(lease_ttl_s=0.3, orphan_ttl_s=0.2)
    async with open_pair("loopback", directory, config=config) as pair:
        pair.host.room.clear()
        pulling = asyncio.create_task(pair.pull(make_request(32)))
        await until(lambda: pair.firsts)
        session = next(iter(pair.destination._book._sessions.values()))
        session._link.send = _swallow
        with pytest.raises((LeaseLost, WorkerLost)):
            await pulling


async def _swallow(message):
    pass


@pytest.mark.parametrize("moment", ["queued", "landing", "room", "final"])
async def test_a_cancelled_pull_frees_both_sides_at_every_moment(transport, directory, moment):
    async with open_pair(transport, directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        prefill = await pair.source_host.started.get()
        if moment == "room":
            pair.host.room.clear()
        if moment != "queued":
            pair.source_host.compute(prefill, 64)
            await asyncio.sleep(0.02)
        if moment == "final":
            pair.host.room.clear()
            pair.source_host.finish(prefill)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert pair.host.dropped == [1]
        await pair.settled()
        await until(lambda: pair.source_host.stopped == [prefill.seq])
        assert pair.host.is_whole
        pair.host.room.set()


async def test_pages_under_a_stuck_read_stay_in_quarantine_until_it_is_over(directory):
    gate = Gate()
    async with open_pair("loopback", directory, exchange=Exchange(gate)) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        await asyncio.to_thread(gate.reached.wait, 60)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert pair.host.dropped == [1]
        await asyncio.sleep(0.1)
        stuck = pair.host.unproven
        assert len(stuck) == 4
        assert pair.destination.statistics()["unproven_pages"] >= 4
        gate.open.set()
        await pair.settled()
        assert pair.host.is_whole
        assert pair.destination.statistics()["unproven_pages"] == 0


async def test_a_stuck_row_read_keeps_its_staging_slot_and_never_writes_the_row(directory):
    gate = Gate(only=lambda op: op.nbytes in (160, 48))  # the ring and the state
    async with open_pair("loopback", directory, exchange=Exchange(gate), config=quick(staging_rows=1)) as pair:
        before = pair.host.pool.bytes_of("ring", 1).copy()
        pulling = asyncio.create_task(pair.pull(make_request(16)))
        await asyncio.to_thread(gate.reached.wait, 60)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert pair.host.is_whole, "pages are not held for a read that writes only the staging slot"
        next_pull = asyncio.create_task(pair.pull(make_request(16, "req-2"), seq=2))
        await until(lambda: len(pair.firsts) == 2)
        await asyncio.sleep(0.05)
        assert not next_pull.done(), "the only slot is still in doubt"
        gate.open.set()
        await next_pull
        assert np.array_equal(pair.host.pool.bytes_of("ring", 0), before)
        assert pair.destination.statistics()["unproven_pages"] == 0


async def test_over_budget_the_transport_is_destroyed_and_opened_anew(directory):
    gate = Gate()
    config = quick(quarantine_pages=2, quarantine_grace_s=0.05)
    async with open_pair("loopback", directory, exchange=Exchange(gate), config=config) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        await asyncio.to_thread(gate.reached.wait, 60)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await until(lambda: pair.destination.statistics()["fences"] == 1)
        gate.open.set()
        await until(lambda: pair.host.is_whole)
        request = make_request(64, "req-2")
        await pair.pull(request, seq=2)
        pair.host.assert_landed(2, request, row=1)


async def test_a_peer_that_lands_no_byte_fails_the_pull_but_not_the_pages(directory):
    gate = Gate()
    config = quick(progress_timeout_s=0.1)
    async with open_pair("loopback", directory, exchange=Exchange(gate), config=config) as pair:
        with pytest.raises(TransferFailed, match="no byte landed"):
            await pair.pull(make_request(64))
        assert pair.host.unproven
        gate.open.set()
        await pair.settled()
        assert pair.host.is_whole


async def test_a_failed_read_fails_the_pull_and_the_next_one_succeeds(directory):
    gate = Gate()
    gate.error = TransferFailed("injected")
    gate.open.set()
    async with open_pair("loopback", directory, exchange=Exchange(gate)) as pair:
        with pytest.raises(TransferFailed, match="injected"):
            await pair.pull(make_request(64))
        await pair.settled()
        assert pair.host.is_whole
        gate.error = None
        await pair.pull(make_request(64, "req-2"), seq=2)


async def test_the_deadline_ends_a_pull(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        with pytest.raises(DeadlineExceeded):
            await pair.pull(make_request(64), timeout_s=0.1)
        assert pair.host.dropped == [1]
        await pair.settled()


async def test_a_peer_that_fails_repeatedly_is_left_alone_for_a_while(directory):
    async with open_pair("loopback", directory, config=quick(breaker_min_s=1.0)) as pair:
        pair.dialer.withdraw(ADDRESS)
        for seq in range(1, 4):
            with pytest.raises(WorkerLost, match="nobody answers"):
                await pair.pull(make_request(20), seq=seq)
        with pytest.raises(NoCapacity, match="left alone") as caught:
            await pair.pull(make_request(20), seq=4)
        assert 0 < caught.value.retry_after_s <= 1.0
        assert pair.destination.statistics()["breakers_open"] == 1
        pair.dialer.serve(ADDRESS, pair.source)
        await asyncio.sleep(1.05)
        await pair.pull(make_request(20), seq=5)
        assert pair.destination.statistics()["breakers_open"] == 0
        assert pair.host.dropped == [1, 2, 3, 4]


async def test_layouts_that_differ_are_refused_before_any_request(directory):
    ours = make_layout(num_pages=64, index_bytes=128)
    async with open_pair("loopback", directory, target_layout=ours) as pair:
        with pytest.raises(NamespaceMismatch, match=r"components\[index\].record_bytes"):
            await pair.pull(make_request(20))
        assert pair.source.statistics()["prepares"] == 0


async def test_a_stale_answer_in_mid_flight_is_a_lost_worker(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        await pair.source_host.started.get()
        pair.dialer.links[0]._to_d.put_nowait(Stale(incarnation=fresh_incarnation()))
        with pytest.raises(WorkerLost):
            await pulling


async def test_a_source_that_skips_tokens_is_not_believed(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        prefill = await pair.source_host.started.get()
        transfer = next(iter(pair.source._desk._transfers.values()))
        transfer.announced_end = 16
        pair.source_host.compute(prefill, 64)
        with pytest.raises(TransferFailed, match="announced tokens 16"):
            await pulling
        await pair.settled()


async def test_closing_ends_pulls_and_brings_every_page_home(transport, directory):
    async with open_pair(transport, directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        prefill = await pair.source_host.started.get()
        pair.source_host.compute(prefill, 32)
        await pair.destination.close()
        with pytest.raises(Aborted):
            await pulling
        assert pair.host.is_whole
        with pytest.raises(Aborted):
            await pair.pull(make_request(64), seq=2)
        assert pair.host.dropped == [1, 2]


async def test_closing_the_source_fails_its_hand_overs(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(64)))
        await pair.source_host.started.get()
        await pair.source.close()
        with pytest.raises(Draining):
            await pulling


async def test_events_that_overtake_the_return_of_start_are_not_lost(directory):
    async with open_pair("loopback", directory, computing=False) as pair:
        start = pair.source_host.start

        async def slow_return(request, timeout_s):
            seq = await start(request, timeout_s)
            prefill = pair.source_host.prefills[seq]
            pair.source_host.compute(prefill, 32)
            pair.source_host.finish(prefill)
            await asyncio.sleep(0.01)
            return seq

        pair.source_host.start = slow_return
        request = make_request(32)
        await pair.pull(request)
        pair.host.assert_landed(1, request, row=1)


async def test_a_reaper_that_crashes_is_told_because_nobody_else_unpins(directory):
    clock, crashes = ManualClock(), asyncio.Queue()
    tell = lambda name, error: crashes.put_nowait((name, error))  # noqa: E731
    async with open_pair("loopback", directory, computing=False, source_clock=clock, on_crash=tell) as pair:
        pulling = asyncio.create_task(pair.pull(make_request(40)))
        prefill = await pair.source_host.started.get()
        await until(lambda: pair.source.num_leases)
        stop = pair.source_host.stop
        pair.source_host.stop = lambda seq: 1 // 0
        clock.advance(1000.0)
        async with asyncio.timeout(30):
            name, error = await crashes.get()
        assert (name, type(error)) == ("lease reaper", ZeroDivisionError)
        stop(prefill.seq)
        pulling.cancel()
        await asyncio.gather(pulling, return_exceptions=True)


async def test_a_sweeper_that_crashes_is_told_because_nobody_else_gives_unproven_pages_back(directory, monkeypatch):
    crashes = asyncio.Queue()
    tell = lambda name, error: crashes.put_nowait((name, error))  # noqa: E731
    async with open_pair("loopback", directory, on_crash=tell) as pair:
        await pair.pull(make_request(40))
        monkeypatch.setattr(Reader, "tick", lambda self: 1 // 0)
        async with asyncio.timeout(30):
            assert (await crashes.get())[0] == "KV sweeper"
