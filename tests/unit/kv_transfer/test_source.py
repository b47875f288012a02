"""The source's answers: idempotent, total, and every lease ends exactly once."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from core.clock import ManualClock
from core.errors import BadRequest, ConfigError, NamespaceMismatch, NoCapacity
from core.handover import (
    Abort,
    Aborted,
    Accept,
    ChunkReady,
    Failed,
    Final,
    Gone,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloReply,
    Prepare,
    Reject,
    Release,
    Released,
    Stale,
)
from core.ids import LeaseId, TransferId, fresh_incarnation
from kv_transfer.exchange import Exchange
from kv_transfer.factory import TransportFactory
from kv_transfer.lease_desk import MAX_REMEMBERED
from kv_transfer.settings import TransportSettings
from kv_transfer.source import Source
from tests.fakes.kv_pair import FINGERPRINT, quick
from tests.fakes.kv_pools import FakeSourceHost, Pool, make_layout, make_request

LAYOUT = make_layout(num_pages=64)


class Desk:
    """A source and one peer's view of it."""

    def __init__(self, source, host, clock, pool):
        self.source, self.host, self.clock, self.pool = source, host, clock, pool
        self.heard = []
        self.link = source.open_link(self.heard.append)

    def hello(self, **changes):
        fields = {"incarnation": fresh_incarnation(), "fingerprint": FINGERPRINT, "layout": LAYOUT.encode()}
        return Hello(**(fields | changes))

    async def say(self, message, link=None):
        """Return what was answered once everything has run."""
        before = len(self.heard)
        await (link or self.link).handle(message)
        for _ in range(5):
            await asyncio.sleep(0)
        return self.heard[before:]

    async def prepare(self, name="t", tokens=40, **changes):
        fields = {"transfer": TransferId(name), "request": make_request(tokens, name), "prefix_tokens": 0}
        return await self.say(Prepare(**(fields | {"lease_ttl_s": 30.0} | changes)))

    async def ready(self, name="t"):
        """A hand-over whose prefill is done."""
        (answer,) = await self.prepare(name)
        prefill = self.host.started.get_nowait()
        self.host.compute(prefill, 40)
        self.host.finish(prefill)
        return answer.lease, prefill


@asynccontextmanager
async def open_desk(hello=True, **config):
    clock, pool = ManualClock(), Pool(LAYOUT)
    host = FakeSourceHost(pool)
    settings = quick(transports=("loopback",), sweep_interval_s=3600.0, **config)
    source = Source(
        config=settings,
        incarnation=pool.incarnation,
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        regions=pool.memory.regions,
        host=host,
        opener=TransportFactory(TransportSettings(pool.incarnation, settings, Exchange()), pool.memory.regions, clock),
        clock=clock,
    )
    host.source = source
    await source.start()
    desk = Desk(source, host, clock, pool)
    if hello:
        (reply,) = await desk.say(desk.hello())
        assert isinstance(reply, HelloReply)
    yield desk
    await source.close()
    assert len(pool.free) == 63
    pool.memory.close()


async def test_hello_tells_layout_and_exports():
    async with open_desk(hello=False) as desk:
        (reply,) = await desk.say(desk.hello(expected=desk.pool.incarnation))
        assert reply.incarnation == desk.pool.incarnation
        assert reply.layout == LAYOUT.encode()
        assert [name for name, _ in reply.exports] == ["loopback"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"fingerprint": b"other"},
        {"layout": make_layout(num_pages=64, index_bytes=128).encode()},
        {"layout": b"garbage"},
        {"layout": msgspec.structs.replace(LAYOUT, version=2).encode()},
    ],
)
async def test_a_pair_that_must_not_exist_is_refused_before_any_address_is_told(wrong):
    async with open_desk(hello=False) as desk:
        with pytest.raises(NamespaceMismatch):
            await desk.say(desk.hello(**wrong))
        assert desk.heard == []


async def test_another_incarnation_is_told_who_lives_here():
    async with open_desk(hello=False) as desk:
        assert await desk.say(desk.hello(expected=fresh_incarnation())) == [Stale(incarnation=desk.pool.incarnation)]


async def test_nothing_is_done_before_hello():
    async with open_desk(hello=False) as desk:
        with pytest.raises(BadRequest):
            await desk.prepare()
        assert desk.source.num_leases == 0


async def test_the_whole_conversation():
    async with open_desk() as desk:
        (accept,) = await desk.prepare()
        assert isinstance(accept, Accept)
        prefill = desk.host.started.get_nowait()
        desk.host.compute(prefill, 24)
        desk.host.compute(prefill, 40)
        desk.host.finish(prefill)
        first, second, final = desk.heard[-3:]
        assert (first.start, first.end, len(first.pages)) == (0, 16, 1), "the page in the middle is not final yet"
        assert (second.start, second.end, len(second.pages)) == (16, 40, 2)
        assert [ref.page for ref in (*first.pages, *second.pages)] == prefill.pages
        assert (final.num_tokens, final.num_chunks, final.row) == (40, 2, prefill.row)
        release = Release(transfer=TransferId("t"), lease=accept.lease)
        assert await desk.say(release) == [Released(transfer=TransferId("t"), valid=True)]
        assert desk.host.stopped == [prefill.seq]
        assert desk.source.num_leases == 0


async def test_the_same_prepare_again_gets_the_same_answer_and_starts_nothing():
    async with open_desk() as desk:
        first = await desk.prepare()
        assert await desk.prepare() == first
        assert len(desk.host.prefills) == 1
        assert desk.source.num_leases == 1


async def test_another_prepare_of_the_same_name_is_rejected_and_the_first_goes_on():
    async with open_desk() as desk:
        await desk.prepare(tokens=40)
        (reject,) = await desk.prepare(tokens=41)
        assert isinstance(reject, Reject)
        assert reject.code == "invalid_request"
        other = desk.source.open_link(desk.heard.append)
        await desk.say(desk.hello(), other)
        same = Prepare(transfer=TransferId("t"), request=make_request(40, "t"), prefix_tokens=0, lease_ttl_s=30.0)
        (reject,) = await desk.say(same, other)
        assert isinstance(reject, Reject)
        assert desk.source.num_leases == 1


async def test_duplicated_releases_get_the_same_answer():
    async with open_desk() as desk:
        lease, prefill = await desk.ready()
        release = Release(transfer=TransferId("t"), lease=lease)
        valid = Released(transfer=TransferId("t"), valid=True)
        assert await desk.say(release) == [valid]
        assert await desk.say(release) == [valid]
        assert desk.host.stopped == [prefill.seq]


async def test_ended_and_unknown_hand_overs_have_answers_for_everything():
    async with open_desk() as desk:
        name = TransferId("t")
        lease, _ = await desk.ready()
        assert await desk.say(Abort(transfer=name)) == [Aborted(transfer=name)]
        assert await desk.say(Abort(transfer=name)) == [Aborted(transfer=name)]
        assert await desk.say(Release(transfer=name, lease=lease)) == [Released(transfer=name, valid=False)]
        assert await desk.prepare() == [Gone(transfer=name)]
        never = TransferId("never")
        assert await desk.say(Abort(transfer=never)) == [Gone(transfer=never)]
        assert await desk.say(Release(transfer=never, lease=LeaseId(1))) == [Gone(transfer=never)]


async def test_a_release_under_another_lease_is_not_believed():
    async with open_desk() as desk:
        lease, _ = await desk.ready()
        wrong = Release(transfer=TransferId("t"), lease=LeaseId(lease + 1))
        assert await desk.say(wrong) == [Gone(transfer=TransferId("t"))]
        assert desk.source.num_leases == 1


async def test_a_release_before_the_final_is_never_valid():
    async with open_desk() as desk:
        (accept,) = await desk.prepare()
        release = Release(transfer=TransferId("t"), lease=accept.lease)
        assert await desk.say(release) == [Released(transfer=TransferId("t"), valid=False)]


async def test_a_lapsed_lease_is_not_valid_even_before_the_reaper_came():
    async with open_desk() as desk:
        lease, _ = await desk.ready()
        desk.clock.advance(10)
        release = Release(transfer=TransferId("t"), lease=lease)
        assert await desk.say(release) == [Released(transfer=TransferId("t"), valid=False)]


async def test_the_reaper_stops_the_prompt_and_tells_the_peer():
    async with open_desk() as desk:
        await desk.prepare()
        prefill = desk.host.started.get_nowait()
        desk.clock.advance(10)
        desk.source._desk.expire()
        assert desk.host.stopped == [prefill.seq]
        assert isinstance(desk.heard[-1], Failed)
        assert desk.heard[-1].code == "lease_lost"


async def test_events_after_the_end_are_ignored():
    async with open_desk() as desk:
        await desk.prepare()
        prefill = desk.host.started.get_nowait()
        await desk.say(Abort(transfer=TransferId("t")))
        before = len(desk.heard)
        desk.host.compute(prefill, 40)
        desk.host.finish(prefill)
        desk.source.failed(prefill.seq, NoCapacity("late"))
        assert len(desk.heard) == before


async def test_heartbeats_renew_own_leases_and_name_the_lost_ones():
    async with open_desk() as desk:
        lease, _ = await desk.ready()
        beat = Heartbeat(leases=(lease, LeaseId(99)), ttl_s=30.0)
        assert await desk.say(beat) == [HeartbeatReply(lost=(LeaseId(99),))]
        desk.clock.advance(29)
        assert await desk.say(beat) == [HeartbeatReply(lost=(LeaseId(99),))]
        other = desk.source.open_link(desk.heard.append)
        await desk.say(desk.hello(), other)
        assert await desk.say(beat, other) == [HeartbeatReply(lost=(lease, LeaseId(99)))]
        desk.clock.advance(31)
        assert await desk.say(beat) == [HeartbeatReply(lost=(lease, LeaseId(99)))]


async def test_no_peer_holds_a_lease_longer_than_allowed():
    async with open_desk(max_lease_ttl_s=20.0) as desk:
        lease, _ = await desk.ready()
        await desk.say(Heartbeat(leases=(lease,), ttl_s=1e9))
        desk.clock.advance(20)
        assert await desk.say(Heartbeat(leases=(lease,), ttl_s=1e9)) == [HeartbeatReply(lost=(lease,))]


async def test_a_closed_link_ends_its_leases_and_only_those():
    async with open_desk() as desk:
        await desk.prepare("a")
        other = desk.source.open_link(desk.heard.append)
        await desk.say(desk.hello(), other)
        await desk.say(
            Prepare(transfer=TransferId("b"), request=make_request(40, "b"), prefix_tokens=0, lease_ttl_s=30.0), other
        )
        desk.link.closed()
        desk.link.closed()
        assert desk.source.num_leases == 1
        assert len(desk.host.stopped) == 1
        assert await desk.prepare("c") == [], "a closed link is deaf"


async def test_an_abort_while_the_prompt_is_being_queued_stops_it_afterwards():
    async with open_desk() as desk:
        gate, start = asyncio.Event(), desk.host.start

        async def slow(request, timeout_s):
            await gate.wait()
            return await start(request, timeout_s)

        desk.host.start = slow
        await desk.prepare()
        await desk.say(Abort(transfer=TransferId("t")))
        gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert desk.host.stopped == [1]


@pytest.mark.parametrize("prefix", [-16, 7, 40, 48, 160])
async def test_a_prefix_that_is_not_a_page_border_inside_the_prompt_is_rejected(prefix):
    async with open_desk() as desk:
        (reject,) = await desk.prepare(prefix_tokens=prefix)
        assert reject.code == "invalid_request"


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
async def test_a_lease_needs_a_life(ttl):
    async with open_desk() as desk:
        (reject,) = await desk.prepare(lease_ttl_s=ttl)
        assert reject.code == "invalid_request"


async def test_ten_thousand_orphans_leave_bounded_tables():
    async with open_desk(max_leases_per_peer=2) as desk:
        for i in range(10_000):
            await desk.link.handle(
                Prepare(transfer=TransferId(str(i)), request=make_request(4, str(i)), prefix_tokens=0, lease_ttl_s=30.0)
            )
            if i % 100 == 0:
                await asyncio.sleep(0)
                desk.clock.advance(10)
                desk.source._desk.expire()
        assert desk.source.num_leases <= 2
        assert len(desk.source._desk._ended) <= MAX_REMEMBERED
        assert desk.source.statistics()["rejects"] > 9000


async def test_digests_keep_the_order_of_announcements():
    async with open_desk() as desk:
        await desk.prepare(digests=True)
        prefill = desk.host.started.get_nowait()
        for upto in (16, 32, 40):
            desk.host.compute(prefill, upto)
        desk.host.finish(prefill)
        async with asyncio.timeout(30):
            while not isinstance(desk.heard[-1], Final):  # noqa: ASYNC110 - the digest thread has no event here
                await asyncio.sleep(0.001)
        chunks = [m for m in desk.heard if isinstance(m, ChunkReady)]
        assert [c.chunk for c in chunks] == [0, 1, 2]
        assert all(len(c.digests) == len(c.pages) for c in chunks)
        assert len(desk.heard[-1].row_digests) == 2


async def test_a_source_without_a_single_transport_refuses_to_start():
    pool, clock = Pool(LAYOUT), ManualClock()
    settings = quick(transports=("shm",))
    source = Source(
        config=settings,
        incarnation=pool.incarnation,
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        regions=pool.memory.regions,
        host=FakeSourceHost(pool),
        opener=TransportFactory(TransportSettings(pool.incarnation, settings), pool.memory.regions, clock),
        clock=clock,
    )
    with pytest.raises(ConfigError, match="shared memory"):
        await source.start()
    await source.close()
    pool.memory.close()
