"""The control link adapter over a real loopback server: what a destination and a source may rely on."""

import asyncio

import msgspec
import pytest

from core.errors import ConfigError, NamespaceMismatch, NoCapacity, WorkerLost
from core.handover import Accept, ChunkReady, Gone, Heartbeat, Hello, HelloReply, Prepare, Release, Released
from core.ids import Incarnation, LeaseId, TransferId
from core.kv import PageRef
from core.request import MmItem
from core.rpc import kv_source
from core.rpc.kv_source import KvSourceDialer, add_kv_source
from tests.fakes.rpc import SourceProbe, a_proof, a_request, serving

TRANSFER = TransferId("t/0")
HELLO = Hello(incarnation=Incarnation("a" * 32), fingerprint=b"f" * 32, layout=b"layout")
REPLY = HelloReply(
    incarnation=Incarnation("b" * 32), fingerprint=b"f" * 32, layout=b"layout", exports=(("shm", b"\0\1"), ("tcp", b""))
)
CHUNK = ChunkReady(
    transfer=TRANSFER, chunk=0, start=0, end=32, pages=(PageRef(3, 1), PageRef(9, 4)), digests=(0, 4294967295)
)


def silent(_message):
    return []


def link_server(probe):
    return serving(lambda server: add_kv_source(server, probe))


async def test_messages_travel_both_ways_in_order():
    def answer(message):
        if isinstance(message, Hello):
            return [REPLY]
        if isinstance(message, Prepare):
            return [Accept(transfer=message.transfer, lease=LeaseId(2**63), expires_in_s=30.0), CHUNK]
        return [Released(transfer=message.transfer, valid=True)]

    probe = SourceProbe(answer)
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        prepare = Prepare(transfer=TRANSFER, request=a_request(), prefix_tokens=16, lease_ttl_s=30.0, digests=True)
        release = Release(transfer=TRANSFER, lease=LeaseId(2**63))
        for message in (HELLO, prepare, release):
            await link.send(message)
        answers = [await link.receive() for _ in range(4)]
        assert answers == [
            REPLY,
            Accept(transfer=TRANSFER, lease=LeaseId(2**63), expires_in_s=30.0),
            CHUNK,
            Released(transfer=TRANSFER, valid=True),
        ]
        assert probe.handled == [HELLO, prepare, release]
        await link.close()


async def test_images_cross_to_the_source_whole():
    pixels = bytes(range(256)) * 3 * 4 * 700
    item = MmItem(digest=b"d" * 32, start=0, end=3, height=700, width=1024, pixels=pixels)
    request = msgspec.structs.replace(a_request(), mm_items=(item,) * 5)
    probe = SourceProbe(lambda message: [Gone(transfer=message.transfer)])
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        prepare = Prepare(transfer=TRANSFER, request=request, prefix_tokens=0, lease_ttl_s=3.0, digests=False)
        await link.send(prepare)
        assert await link.receive() == Gone(transfer=TRANSFER)
        assert probe.handled == [prepare]
        await link.close()


async def test_a_source_may_speak_without_being_asked():
    probe = SourceProbe(lambda _message: [REPLY])
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        await link.send(HELLO)
        assert await link.receive() == REPLY
        probe.send[0](CHUNK)
        assert await link.receive() == CHUNK
        await link.close()


async def test_a_receive_that_timed_out_loses_no_message_and_no_link():
    probe = SourceProbe(lambda message: [Gone(transfer=message.transfer)])
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(link.receive(), 0.02)
        await link.send(Release(transfer=TRANSFER, lease=LeaseId(1)))
        assert await link.receive() == Gone(transfer=TRANSFER)
        await link.close()


async def test_closing_tells_the_source_once_and_after_the_last_message():
    probe = SourceProbe(silent)
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        for number in range(100):
            await link.send(Heartbeat(leases=(LeaseId(number),), ttl_s=1.0))
        await link.close()
        await link.close()
        assert await probe.closed_links.get() == 0
        assert len(probe.handled) == 100
        assert probe.closed_links.empty()
        with pytest.raises(WorkerLost):
            await link.receive()
        with pytest.raises(WorkerLost):
            await link.send(HELLO)


async def test_a_send_of_the_source_after_the_end_does_nothing():
    probe = SourceProbe(silent)
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        await link.send(HELLO)
        await link.close()
        await probe.closed_links.get()
        probe.send[0](CHUNK)


async def test_an_error_of_the_source_ends_the_link_as_itself_after_what_was_answered():
    def answer(message):
        if isinstance(message, Hello):
            return [REPLY]
        raise NamespaceMismatch("another page size")

    probe = SourceProbe(answer)
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        await link.send(HELLO)
        await link.send(Release(transfer=TRANSFER, lease=LeaseId(1)))
        assert await link.receive() == REPLY
        with pytest.raises(NamespaceMismatch, match="another page size"):
            await link.receive()
        with pytest.raises(NamespaceMismatch):
            await link.send(HELLO)
        assert await probe.closed_links.get() == 0
        await link.close()


async def test_a_source_that_stops_is_a_lost_worker():
    probe = SourceProbe(lambda _message: [REPLY])
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        await link.send(HELLO)
        assert await link.receive() == REPLY
    with pytest.raises(WorkerLost):
        await link.receive()
    assert await probe.closed_links.get() == 0
    await link.close()


async def test_a_wrong_secret_opens_no_link_at_the_source():
    probe = SourceProbe(silent)
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof(secret=b"another secret")).dial(address, 3.0)
        with pytest.raises(ConfigError, match="secret"):
            await link.receive()
        await link.close()
    assert probe.send == []


async def test_a_destination_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(kv_source, "OUTBOX_MESSAGES", 8)
    probe = SourceProbe(lambda message: [Gone(transfer=message.transfer)] * 9)
    async with link_server(probe) as address:
        link = await KvSourceDialer(a_proof()).dial(address, 3.0)
        await link.send(HELLO)
        with pytest.raises(NoCapacity, match="unread"):
            while True:
                await link.receive()
        await link.close()
        assert await probe.closed_links.get() == 0


async def test_many_links_are_told_apart():
    def answer(message):
        return [HelloReply(incarnation=message.incarnation, fingerprint=b"", layout=b"", exports=())]

    probe = SourceProbe(answer)
    async with link_server(probe) as address:
        links = [await KvSourceDialer(a_proof()).dial(address, 3.0) for _ in range(5)]
        for number, link in enumerate(links):
            await link.send(Hello(incarnation=Incarnation(f"{number:032x}"), fingerprint=b"", layout=b""))
        replies = [await link.receive() for link in links]
        assert [reply.incarnation for reply in replies] == [f"{number:032x}" for number in range(5)]
        for link in links:
            await link.close()
