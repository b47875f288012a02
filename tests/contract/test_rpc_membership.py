"""Both halves of membership over real loopback servers: joining, beating, events, breaks, siblings, leaving."""

import asyncio
import random
import socket
from contextlib import asynccontextmanager

import msgspec

from core.clock import ManualClock, SystemClock
from core.errors import NamespaceMismatch
from core.ids import Incarnation
from core.lifecycle import State
from core.rpc.membership import add_membership
from core.rpc.membership_client import MembershipClient, MembershipTimes
from core.worker import KvEvent, KvEventBatch
from tests.fakes.rpc import RecordingMembership, a_load, a_proof, a_registration, serving

TIMES = MembershipTimes(heartbeat_s=0.02, connect_s=1.0, register_s=1.0, backoff_first_s=0.01, backoff_max_s=0.05)
INCARNATION = "d" * 32


def gateway(service, port=0):
    return serving(lambda server: add_membership(server, service), port=port)


@asynccontextmanager
async def worker(*addresses, load=a_load, clock=None, proof=None, times=TIMES, on_crash=None):
    client = MembershipClient(
        proof=proof or a_proof(INCARNATION),
        registration=a_registration(),
        load=load,
        addresses=addresses,
        clock=clock or SystemClock(),
        times=times,
        rng=random.Random(1),
        on_crash=on_crash,
    )
    client.start()
    try:
        async with asyncio.timeout(30):
            yield client
    finally:
        await client.close()


async def until(condition):
    while not condition():  # noqa: ASYNC110 - the condition is on a peer's state
        await asyncio.sleep(0.002)


def batch(sequence):
    return KvEventBatch(sequence=sequence, events=(KvEvent(kind="stored", hashes=(sequence, -1), parent=-(2**63)),))


async def test_a_worker_registers_first_and_then_beats_with_its_current_load():
    loads = iter(range(1000))
    service = RecordingMembership()
    async with gateway(service) as address, worker(address, load=lambda: a_load(rows_used=next(loads))):
        await service.until("heartbeat", 4)
    assert service.registrations == [a_registration()]
    assert service.log[0] == ("joined", INCARNATION)
    assert [load.rows_used for load in service.loads[:4]] == [0, 1, 2, 3]


async def test_a_change_of_load_is_reported_at_once():
    states = [State.READY]
    service = RecordingMembership()
    slow = MembershipTimes(heartbeat_s=60.0)
    async with gateway(service) as address, worker(address, load=lambda: a_load(state=states[0]), times=slow) as client:
        await service.until("heartbeat")
        states[0] = State.DRAINING
        client.report_load()
        await service.until("heartbeat", 2)
    assert [load.state for load in service.loads[:2]] == [State.READY, State.DRAINING]


async def test_events_arrive_in_order_between_heartbeats():
    service = RecordingMembership()
    async with gateway(service) as address, worker(address) as client:
        await service.until("heartbeat")
        for sequence in range(1, 201):
            client.publish(batch(sequence))
        await service.until("events", 200)
    assert service.batches == [batch(sequence) for sequence in range(1, 201)]


async def test_events_while_away_are_missed_and_the_sequence_shows_it():
    service = RecordingMembership()
    async with worker("127.0.0.1:1") as client:
        client.publish(batch(1))
        async with gateway(service) as address:
            client._add(address)
            await service.until("heartbeat")
            client.publish(batch(2))
            await service.until("events")
    assert [found.sequence for found in service.batches] == [2]


async def test_a_worker_holds_a_lease_only_while_a_gateway_answers():
    clock = ManualClock()
    service = RecordingMembership(ttl_s=3.0)
    slow = MembershipTimes(heartbeat_s=60.0)
    async with gateway(service) as address, worker(address, clock=clock, times=slow) as client:
        assert not client.holds_lease
        await until(lambda: client.holds_lease)
        clock.advance(3.5)
        assert not client.holds_lease
        client.report_load()
        await until(lambda: client.holds_lease)
        clock.advance(2.5)
        assert client.holds_lease


async def test_a_broken_stream_is_told_and_the_worker_comes_back():
    service = RecordingMembership()
    async with worker() as client:
        async with gateway(service) as address:
            port = int(address.rpartition(":")[2])
            client._add(address)
            await service.until("heartbeat")
        await service.until("lost")
        await until(lambda: not client.holds_lease)
        async with gateway(service, port):
            await service.until("joined", 2)
            await until(lambda: client.holds_lease)
    assert service.registrations == [a_registration()] * 2


async def test_a_listener_that_is_no_gateway_gives_no_lease():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with worker(address, times=MembershipTimes(connect_s=0.1)) as client:
            await until(lambda: client._links[address]._last_logged)
            assert not client.holds_lease
            assert client.gateways == {address: None}


async def test_siblings_are_found_and_joined():
    third = RecordingMembership("3" * 32)
    async with gateway(third) as third_address:
        second = RecordingMembership("2" * 32, siblings=(third_address,))
        async with gateway(second) as second_address:
            first = RecordingMembership("1" * 32, siblings=(second_address,))
            async with gateway(first) as first_address, worker(first_address) as client:
                await third.until("heartbeat")
                await second.until("heartbeat")
                await first.until("heartbeat")
                assert set(client.gateways) == {first_address, second_address, third_address}


async def test_one_gateway_under_two_addresses_keeps_one_stream():
    service = RecordingMembership()
    async with gateway(service) as address:
        other_name = address.replace("127.0.0.1", "localhost")
        async with worker(address, other_name) as client:
            await service.until("joined", 3)
            await until(lambda: any(client.gateways.values()))
            assert sum(welcome is not None for welcome in client.gateways.values()) == 1
            assert service.count("lost") == 0


async def test_a_sibling_that_nobody_lists_any_more_is_forgotten():
    gone = RecordingMembership("2" * 32)
    async with gateway(gone) as gone_address:
        pass
    first = RecordingMembership("1" * 32)
    async with gateway(first) as address, worker(address) as client:
        await first.until("heartbeat")
        client._add(gone_address)
        await until(lambda: gone_address not in client.gateways)
        assert address in client.gateways


async def test_a_sibling_that_is_listed_is_tried_for_ever():
    gone = RecordingMembership("2" * 32)
    async with gateway(gone) as gone_address:
        pass
    first = RecordingMembership("1" * 32, siblings=(gone_address,))
    async with gateway(first) as address, worker(address) as client:
        await first.until("heartbeat", 10)
        assert client.gateways[gone_address] is None
        async with gateway(gone, int(gone_address.rpartition(":")[2])):
            await gone.until("heartbeat")


async def test_leaving_is_acknowledged_by_every_gateway():
    first, second = RecordingMembership("1" * 32), RecordingMembership("2" * 32)
    async with gateway(first) as one, gateway(second) as two, worker(one, two) as client:
        await first.until("heartbeat")
        await second.until("heartbeat")
        assert await client.leave("drained", timeout_s=5.0)
        assert first.log[-1] == second.log[-1] == ("left: drained", INCARNATION)
        assert not client.holds_lease


async def test_leaving_past_a_deaf_gateway_ends_after_the_timeout():
    class Deaf(RecordingMembership):
        def left(self, incarnation, reason):
            raise NamespaceMismatch("planted: no acknowledgement")

    service = Deaf()
    async with gateway(service) as address, worker(address) as client:
        await service.until("heartbeat")
        assert not await client.leave("drained", timeout_s=2.0)


async def test_leaving_without_any_gateway_is_immediate():
    async with worker("127.0.0.1:1") as client:
        assert await client.leave("drained", timeout_s=0.5)


async def test_a_refused_worker_knows_why_and_keeps_trying(caplog):
    service = RecordingMembership(refusal=NamespaceMismatch("another model"))
    async with gateway(service) as address, worker(address) as client:
        await service.until("refused", 5)
        assert client.refusals[address].message == "another model"
        assert isinstance(client.refusals[address], NamespaceMismatch)
        assert not client.holds_lease
        service.refusal = None
        await service.until("heartbeat")
        assert client.refusals == {}
    assert caplog.text.count("not registered") == 1


async def test_a_worker_with_another_secret_never_reaches_the_directory():
    service = RecordingMembership()
    proof = a_proof(INCARNATION, b"another secret")
    async with gateway(service) as address, worker(address, proof=proof) as client:
        await until(lambda: client._links[address]._last_logged)
        assert "secret" in client._links[address]._last_logged
    assert service.log == []


async def test_a_second_stream_of_the_same_worker_hides_the_loss_of_the_first():
    service = RecordingMembership()
    async with gateway(service) as address, worker(address) as old:
        await service.until("heartbeat")
        async with worker(address):
            await service.until("joined", 2)
            await old.close()
            await service.until("heartbeat", service.count("heartbeat") + 3)
            assert service.count("lost") == 0
        await service.until("lost")


async def test_closing_without_leaving_is_a_loss():
    service = RecordingMembership()
    async with gateway(service) as address, worker(address) as client:
        await service.until("heartbeat")
        await client.close()
        await service.until("lost")
    assert service.log[-1] == ("lost", Incarnation(INCARNATION))


async def test_events_published_between_registration_and_welcome_are_not_lost():
    """The gateway may take its snapshot before our welcome arrives: what happens after it must still be told."""

    class Slow(RecordingMembership):
        def joined(self, registration):
            client.publish(batch(7))  # while the welcome is still on its way
            return super().joined(registration)

    service = Slow()
    async with gateway(service) as address, worker(address) as client:
        await service.until("events")
    assert service.batches == [batch(7)]


async def test_a_worker_that_is_leaving_joins_nobody_new():
    class Late(RecordingMembership):
        def joined(self, registration):
            leaving.append(asyncio.ensure_future(client.leave("drained", timeout_s=1.0)))
            return super().joined(registration)

    leaving = []
    service = Late()
    async with gateway(service) as address, worker(address) as client:
        await service.until("lost")
        assert await leaving[0]
        assert not client.holds_lease
    assert service.count("joined") == 1


async def test_a_bug_in_the_heartbeat_is_told_and_not_taken_for_a_silent_gateway():
    service, crashes = RecordingMembership(ttl_s=0.2), asyncio.Queue()

    def broken():
        raise ZeroDivisionError

    def tell(name, error):
        crashes.put_nowait(error)

    async with gateway(service) as address, worker(address, load=broken, on_crash=tell):
        assert isinstance(await crashes.get(), ZeroDivisionError)


async def test_a_worker_follows_a_name_to_gateways_that_come_later(monkeypatch):
    found = []

    async def look_up(_name):
        return tuple(found)

    monkeypatch.setattr("core.rpc.membership_client.look_up", look_up)
    first, second = RecordingMembership("1" * 32), RecordingMembership("2" * 32)
    times = msgspec.structs.replace(TIMES, look_up_s=0.01)
    async with gateway(first) as one, gateway(second) as two:
        found.append(one)
        async with worker("dns:gateways:9500", times=times) as client:
            await first.until("heartbeat")
            assert not second.log
            found.append(two)
            await second.until("heartbeat")
            assert set(client.gateways) == {one, two}
