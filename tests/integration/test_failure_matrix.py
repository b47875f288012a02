"""The failure matrix of KV transfer, row by row: real processes, real signals, real gRPC, real transports, no engine.

The fake hosts of both sides are the oracle: they raise when a page is freed twice, proven without doubt or dropped twice,
and every record of a committed hand-over is compared with what its source computed. The same faults under a whole
cluster with text as the oracle: `tests/e2e/test_failures.py` and `tests/e2e/test_transfer_soak.py`.
"""

import asyncio
import random

import numpy as np
import pytest

from core.errors import (
    ChecksumMismatch,
    Draining,
    LeaseLost,
    NamespaceMismatch,
    NoCapacity,
    TandemError,
    TransferFailed,
    WorkerLost,
)
from core.handover import (
    Accept,
    Failed,
    Gone,
    Heartbeat,
    Hello,
    HelloReply,
    Prepare,
    Reject,
    Release,
    Released,
)
from core.ids import LeaseId, TransferId, fresh_incarnation
from core.rpc.kv_source import KvSourceDialer
from core.rpc.proof import Proof
from kv_transfer.memory import region_view
from tests.fakes.kv_pools import make_layout, make_request
from tests.fakes.kv_worker_process import FINGERPRINT, LAYOUT, SECRET, DestinationSide, SourceSide, child, opened

TRANSPORTS = ["shm", "tcp"]
QUICK = {"lease_ttl_s": 1.2, "orphan_ttl_s": 1.2, "prepare_timeout_s": 1.0, "progress_timeout_s": 0.8}
"""A silent source is given up after 3 missed heartbeats = 0.6 s."""


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


async def until(condition, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Wrapped:
    """A dialer whose links pass through `change`: message -> the messages that are sent instead."""

    def __init__(self, change=None, receive=None):
        self.change, self.on_receive, self.links = change, receive, []

    def __call__(self, dialer):
        self.dialer = dialer
        return self

    async def dial(self, address, timeout_s):
        link = WrappedLink(await self.dialer.dial(address, timeout_s), self)
        self.links.append(link)
        return link


class WrappedLink:
    def __init__(self, link, wrapped):
        self.link, self.wrapped, self.partitioned = link, wrapped, False
        self.waiting = []

    async def send(self, message):
        if self.partitioned:
            return
        for each in self.wrapped.change(message) if self.wrapped.change else (message,):
            await self.link.send(each)

    async def receive(self):
        while True:
            if not self.waiting:
                message = await self.link.receive()
                self.waiting = list(self.wrapped.on_receive(message)) if self.wrapped.on_receive else [message]
            if self.partitioned:
                self.waiting = []
                await asyncio.sleep(3600)
            if self.waiting:
                return self.waiting.pop(0)

    async def close(self):
        await self.link.close()


async def test_row_1_a_source_that_dies_before_final_fails_the_pull_and_another_one_serves(transport, directory):
    async with (
        child("source", transport, directory, manual=True) as first,
        child("source", transport, directory) as second,
        opened(DestinationSide(transport, directory)) as here,
    ):
        pulling = asyncio.create_task(here.pull(first.address, 400, 1))
        await first.until(lambda state: state["prefills"])
        await first.ask("compute", 160)
        await until(lambda: here.destination.statistics()[f"bytes_landed_{transport}"])
        await first.kill()
        with pytest.raises(WorkerLost):
            await pulling
        assert here.firsts == [], "no token of a prompt that was not computed"
        await here.settled()
        assert here.host.is_whole
        await here.pull(second.address, 400, 2, name="req-1", attempt=1)
        here.host.assert_landed(2, make_request(400, "req-1"), 2)


async def test_row_2_a_source_that_stalls_fails_the_pull_in_time_and_no_page_before_proof(transport, directory):
    async with (
        child("source", transport, directory, manual=True) as source,
        opened(DestinationSide(transport, directory, config=QUICK)) as here,
    ):
        pulling = asyncio.create_task(here.pull(source.address, 400, 1))
        await source.until(lambda state: state["prefills"])
        await source.ask("compute", 160)
        source.stop()
        with pytest.raises(TandemError) as failure:
            await pulling
        assert failure.value.code in ("worker_lost", "transfer_failed", "lease_lost")
        # Pages come home by proof only; both transports can give it without the source.
        await here.settled()
        assert here.host.is_whole


async def test_row_2_a_partition_fails_the_pull_although_no_connection_ends(transport, directory):
    wrapped = Wrapped()
    async with (
        child("source", transport, directory, manual=True, config=QUICK) as source,
        opened(DestinationSide(transport, directory, config=QUICK, wrap=wrapped)) as here,
    ):
        pulling = asyncio.create_task(here.pull(source.address, 400, 1))
        await source.until(lambda state: state["prefills"])
        wrapped.links[0].partitioned = True
        with pytest.raises(WorkerLost, match="silent"):
            await pulling
        await here.settled()
        assert here.host.is_whole
        # The source hears nothing either, and its leases end on its own clock (or with the link).
        await source.whole()


async def test_row_3_a_source_that_wakes_up_again_changes_no_byte_of_pages_given_to_others(transport, directory):
    async with (
        child("source", transport, directory, manual=True, config=QUICK) as source,
        opened(DestinationSide(transport, directory, config=QUICK)) as here,
    ):
        pulling = asyncio.create_task(here.pull(source.address, 1200, 1))
        await source.until(lambda state: state["prefills"])
        await source.ask("compute", 800)
        source.stop()
        with pytest.raises(TandemError):
            await pulling
        await here.settled()
        memory = region_view(here.pool.memory.regions[0])
        memory[:] = 201
        source.resume()
        assert (await source.whole())["leases"] == 0
        await asyncio.sleep(0.3)  # nothing to wait for: the point is that nothing comes
        assert (memory == 201).all()
        await source.ask("auto")
        await until(lambda: here.destination.statistics()["breakers_open"] == 0)
        await here.pull(source.address, 400, 2)
        here.host.assert_landed(2, make_request(400, "req-2"), 2)


async def test_row_4_a_destination_that_dies_leaves_no_lease(transport, directory):
    async with opened(SourceSide(transport, directory, manual=True)) as here:
        async with child("destination", transport, directory, address=here.address) as reader:
            await reader.line()
            await until(lambda: here.host.prefills)
            here.do("compute", "160")
            await reader.kill()
            await until(lambda: not here.source.num_leases)
        assert sorted(here.pool.free) == list(range(1, here.pool.num_pages))
        here.do("auto")
        async with opened(DestinationSide(transport, directory)) as other:
            await other.pull(here.address, 400, 1)


async def test_row_5_a_destination_that_stalls_longer_than_its_lease_is_told_so_and_recomputes(transport, directory):
    async with (
        opened(SourceSide(transport, directory, manual=True, config=QUICK)) as here,
        child("destination", transport, directory, address=here.address, config=QUICK) as reader,
    ):
        await reader.line()
        await until(lambda: here.host.prefills)
        here.do("compute", "160")
        reader.stop()
        await until(lambda: not here.source.num_leases)
        assert here.source.statistics()["ended_by_expire"] == 1
        assert sorted(here.pool.free) == list(range(1, here.pool.num_pages)), "expiry frees the pages"
        here.do("auto")
        reader.resume()
        ended = await reader.line()
        assert ended["error"] in ("lease_lost", "worker_lost"), ended
        while "landed" not in ended:
            ended = await reader.line()


@pytest.mark.parametrize("state", ["before prefill", "during prefill", "landing", "after commit"])
async def test_row_6_an_abort_in_any_state_gives_everything_back_on_both_sides(transport, directory, state):
    async with (
        child("source", transport, directory, manual=True) as source,
        opened(DestinationSide(transport, directory)) as here,
    ):
        if state == "landing":
            here.host.room.clear()
        pulling = asyncio.create_task(here.pull(source.address, 400, 1))
        await source.until(lambda found: found["prefills"])
        if state != "before prefill":
            await source.ask("compute", 160)
        if state == "after commit":
            await source.ask("finish")
            await pulling
            here.host.release(1)
        pulling.cancel()
        await asyncio.gather(pulling, return_exceptions=True)
        await here.settled()
        assert here.host.is_whole
        await source.whole()


async def test_row_7_a_destination_without_room_keeps_its_lease_alive_and_lands_later(transport, directory):
    config = QUICK | {"lease_ttl_s": 3.0, "orphan_ttl_s": 3.0}  # nobody here is silent, but a loaded machine may stall
    async with (
        child("source", transport, directory, config=config) as source,
        opened(DestinationSide(transport, directory, config=config)) as here,
    ):
        here.host.room.clear()
        pulling = asyncio.create_task(here.pull(source.address, 400, 1))
        await source.until(lambda state: state["renewals"] >= 8)
        assert here.destination.statistics()["reads_" + transport] == 0, "nothing is read without room"
        here.host.room.set()
        await pulling
        here.host.assert_landed(1, make_request(400), 1)
        # ... and after a limit the pull gives up and the source has everything back.
        here.host.room.clear()
        with pytest.raises(TandemError, match="longer than"):
            await here.pull(source.address, 400, 2, timeout_s=0.5)
        await source.whole()


async def test_row_8_a_preempted_sequence_comes_back_by_a_new_attempt_and_never_by_the_old_lease(transport, directory):
    """Retraction in a whole engine: `tests/e2e/test_transfer_equality.py`."""
    names = []

    def note(message):
        if isinstance(message, Prepare):
            names.append(message.transfer)
        return (message,)

    async with (
        child("source", transport, directory) as source,
        opened(DestinationSide(transport, directory, wrap=Wrapped(note))) as here,
    ):
        await here.pull(source.address, 400, 1)
        here.host.release(1)
        here.host.landings.clear()
        await here.pull(source.address, 400, 2, name="req-1")
        here.host.assert_landed(2, make_request(400), 2)
        assert len(set(names)) == 2, "the second hand-over has a name of its own"
        assert (await source.whole())["releases_valid"] == 2


@pytest.mark.parametrize("digests", [True, False])
async def test_row_9_a_byte_that_changed_on_its_way_discards_the_attempt(transport, directory, digests):
    """Negative control: without digests the same flip goes unseen by the protocol."""
    async with (
        child("source", transport, directory, manual=True) as source,
        opened(DestinationSide(transport, directory, config={"digests": digests})) as here,
    ):
        here.host.room.clear()
        pulling = asyncio.create_task(here.pull(source.address, 64, 1))
        await source.until(lambda state: state["prefills"])
        await source.ask("finish")
        await until(lambda: here.firsts)
        await source.ask("spoil")
        here.host.room.set()
        if not digests:
            await pulling
            with pytest.raises(AssertionError):
                here.host.assert_landed(1, make_request(64), 1)
            return
        with pytest.raises(ChecksumMismatch, match="pages"):
            await pulling
        assert here.destination.statistics()["digest_failures"] == 1
        await here.settled()
        assert here.host.is_whole
        await source.whole()
        await source.ask("auto")
        await here.pull(source.address, 64, 2, name="req-1", attempt=1)
        here.host.assert_landed(2, make_request(64, "req-1"), 2)


async def test_row_10_layouts_that_differ_are_refused_at_hello_and_no_request_is_admitted(transport, directory):
    async with (
        child("source", transport, directory, layout={"page_bytes": 2048}) as source,
        opened(DestinationSide(transport, directory)) as here,
    ):
        with pytest.raises(NamespaceMismatch, match=r"components\[kv\]\.record_bytes"):
            await here.pull(source.address, 400, 1)
        assert (await source.ask("state"))["prepares"] == 0
        assert here.host.is_whole


@pytest.mark.parametrize("seed", [1, 2])
async def test_row_11_lost_doubled_and_overtaken_messages_lose_nothing(transport, directory, seed):
    rng = random.Random(seed)

    def noisy(message):
        if isinstance(message, Hello | HelloReply):
            return (message,)
        luck = rng.random()
        return () if luck < 0.03 else (message, message) if luck < 0.3 else (message,)

    held = []

    def overtaken(message):
        out = list(noisy(message))
        if rng.random() < 0.06 and not held:
            held.extend(out)
            return ()
        out += held
        held.clear()
        return out

    config = QUICK | {"prepare_timeout_s": 0.4, "release_timeout_s": 0.4}
    async with (
        child("source", transport, directory, config=QUICK) as source,
        opened(DestinationSide(transport, directory, config=config, wrap=Wrapped(noisy, overtaken))) as here,
    ):
        landed = 0
        for seq in range(1, 11):
            try:
                await here.pull(source.address, 100 + 16 * seq, seq, timeout_s=1.2)
            except TandemError:
                await here.settled()
                continue
            here.host.assert_landed(seq, make_request(100 + 16 * seq, f"req-{seq}"), seq % 4)
            here.host.release(seq)
            landed += 1
        assert landed > 2, "the noise left nothing to see"
        assert here.host.is_whole
        await source.whole()


async def test_row_12_a_lease_that_ends_while_the_destination_waits_for_memory_is_recomputed(transport, directory):
    """Heartbeats are lost, so the lease lapses; row 7 is the same with heartbeats."""
    deaf = Wrapped(lambda message: () if isinstance(message, Heartbeat) else (message,))
    async with (
        child("source", transport, directory, config=QUICK | {"orphan_ttl_s": 0.3}) as source,
        opened(DestinationSide(transport, directory, wrap=deaf)) as here,
    ):
        here.host.room.clear()
        with pytest.raises(LeaseLost):
            await here.pull(source.address, 400, 1)
        assert (await source.whole())["ended_by_expire"] == 1
        assert here.host.is_whole


async def test_row_13_one_read_that_fails_discards_the_whole_attempt(transport, directory):
    """Ranks of one worker are not executed yet; what a rank would be is one group of reads beside others."""
    async with (
        child("source", transport, directory, manual=True) as source,
        opened(DestinationSide(transport, directory)) as here,
    ):
        pulling = asyncio.create_task(here.pull(source.address, 400, 1))
        await source.until(lambda state: state["prefills"])
        await source.ask("compute", 320)
        landed = f"bytes_landed_{transport}"
        await until(lambda: here.destination.statistics()[landed] and not here.destination.statistics()["open_ops"])
        reader = here.destination._book._readers[transport]
        submit, failed = reader.transport.submit, []

        def broken(peer, records, transfer, lease, deadline):
            op = submit(peer, records, transfer, lease, 0.0)  # past its deadline: fails with proof
            failed.append(op)
            return op

        reader.transport.submit = broken
        await source.ask("finish")
        with pytest.raises(TransferFailed):
            await pulling
        assert failed
        reader.transport.submit = submit
        await here.settled()
        assert here.host.is_whole
        await source.whole()


async def test_row_14_a_full_queue_is_waited_for_and_is_nobodys_failure(transport, directory):
    config, layout = {"max_bytes_per_op": 4096, "max_run_bytes": 4096}, {"page_bytes": 65536}
    async with (
        child("source", transport, directory, layout=layout) as source,
        opened(DestinationSide(transport, directory, config=config, layout=layout)) as here,
    ):
        await asyncio.gather(*(here.pull(source.address, 480, seq) for seq in (1, 2, 3)))
        for seq in (1, 2, 3):
            here.host.assert_landed_pages(seq, make_request(480, f"req-{seq}"))
        full = here.destination.statistics()[f"reads_refused_full_{transport}"]
        assert full > 0, "the queue was never full: nothing was shown"
        assert here.destination.statistics()["breakers_open"] == 0
        assert here.destination.statistics()["pulls_failed"] == 0


async def test_row_15_another_process_at_the_same_address_is_told_apart(transport, directory):
    async with opened(DestinationSide(transport, directory)) as here:
        async with child("source", transport, directory, manual=True) as first:
            port, old = int(first.address.rsplit(":", 1)[1]), first.incarnation
            pulling = asyncio.create_task(here.pull(first.address, 400, 1, incarnation=old))
            await first.until(lambda state: state["prefills"])
            await first.kill()
            with pytest.raises(WorkerLost):
                await pulling
        async with child("source", transport, directory, port=port) as second:
            with pytest.raises(WorkerLost, match="restarted"):
                await here.pull(second.address, 400, 2, incarnation=old)
            assert (await second.ask("state"))["prepares"] == 0
            await here.pull(second.address, 400, 3, incarnation=second.incarnation)
            here.host.assert_landed(3, make_request(400, "req-3"), 3)


async def test_row_16_a_drained_source_refuses_new_prompts_and_ends_with_no_lease(transport, directory):
    async with (
        child("source", transport, directory, manual=True) as source,
        opened(DestinationSide(transport, directory)) as here,
    ):
        pulling = asyncio.create_task(here.pull(source.address, 400, 1))
        await source.until(lambda state: state["prefills"])
        await source.ask("drain")
        with pytest.raises(Draining):
            await here.pull(source.address, 400, 2)
        await source.ask("finish")
        await pulling
        here.host.assert_landed(1, make_request(400), 1)
        await source.whole()
        source.process.stdin.close()
        assert await source.process.wait() == 0
        statistics = here.destination.statistics()
        assert statistics["open_ops"] == statistics["unproven_pages"] == 0


class RawLink:
    """A control link spoken by hand."""

    def __init__(self, link):
        self.link = link

    async def ask(self, message, kind):
        await self.link.send(message)
        async with asyncio.timeout(30):
            while not isinstance(answer := await self.link.receive(), kind):
                pass
        return answer


async def raw(address):
    me = fresh_incarnation()
    link = RawLink(await KvSourceDialer(Proof(SECRET, me)).dial(address, 5.0))
    layout = make_layout(num_pages=16, **LAYOUT)
    await link.ask(Hello(incarnation=me, fingerprint=FINGERPRINT, layout=layout.encode()), HelloReply)
    return link


def prepare(name, tokens=400):
    return Prepare(transfer=TransferId(name), request=make_request(tokens), prefix_tokens=0, lease_ttl_s=30.0)


async def test_row_17_a_duplicate_or_replayed_name_is_refused_and_the_first_goes_on(transport, directory):
    async with child("source", transport, directory, manual=True) as source:
        link = await raw(source.address)
        first = await link.ask(prepare("t-1"), Accept)
        assert await link.ask(prepare("t-1"), Accept) == first, "the same question has the same answer"
        refused = await link.ask(prepare("t-1", 200), Reject)
        assert refused.code == "invalid_request"
        other = await raw(source.address)
        assert isinstance(await other.ask(prepare("t-1"), Accept | Reject), Reject), "nor by another peer"
        await source.ask("finish")
        done = await link.ask(Release(transfer=TransferId("t-1"), lease=first.lease), Released)
        assert done.valid
        # What is consumed is not handed out again.
        assert isinstance(await link.ask(prepare("t-1"), Accept | Gone), Gone)
        again = await link.ask(Release(transfer=TransferId("t-2"), lease=LeaseId(99)), Gone | Released)
        assert isinstance(again, Gone)
        await source.whole()
        await link.link.close()
        await other.link.close()


async def test_row_18_orphans_end_by_themselves_and_their_number_is_bounded(transport, directory):
    config = {"orphan_ttl_s": 2.0, "max_leases_per_peer": 5}
    async with child("source", transport, directory, manual=True, config=config) as source:
        link = await raw(source.address)
        answers = [await link.ask(prepare(f"t-{number}", 32), Accept | Reject) for number in range(8)]
        assert [isinstance(answer, Accept) for answer in answers] == [True] * 5 + [False] * 3
        assert answers[-1].code == NoCapacity("").code
        async with asyncio.timeout(30):
            assert isinstance(await link.link.receive(), Failed)
        state = await source.whole()
        assert state["orphans"] == 5
        assert isinstance(await link.ask(prepare("t-9", 32), Accept | Reject), Accept), "the peer may ask again"
        await link.link.close()


def test_the_oracle_of_this_matrix_sees_a_wrong_byte_and_a_leak(directory):
    async def check():
        async with opened(SourceSide("tcp", directory)) as source, opened(DestinationSide("tcp", directory)) as here:
            await here.pull(source.address, 64, 1)
            here.host.assert_landed(1, make_request(64), 1)
            assert not here.host.is_whole
            page = next(iter(here.host.landings[1].pages.values()))
            before = here.pool.bytes_of("kv", page).copy()
            here.pool.bytes_of("kv", page)[3] ^= 1
            with pytest.raises(AssertionError):
                here.host.assert_landed(1, make_request(64), 1)
            here.pool.bytes_of("kv", page)[:] = before
            assert np.array_equal(here.pool.bytes_of("kv", page), before)

    asyncio.run(check())
