"""The contract of `kv_transfer.api.Transport`, over every backend. A new backend is one line in TRANSPORTS."""

import itertools
import time

import msgspec
import numpy as np
import pytest

from core.errors import Aborted, BadRequest, ConfigError, LeaseLost, NoCapacity, TransferFailed
from core.ids import LeaseId, fresh_incarnation
from kv_transfer.api import MemoryRegion, OpState, PeerInfo, SupportsCancel
from kv_transfer.config import TransferConfig
from kv_transfer.factory import BACKENDS, open_transport
from kv_transfer.memory import allocate
from kv_transfer.settings import TransportSettings
from tests.fakes.kv_ends import VARIANTS, copies, failed, open_ends

TRANSPORTS = [
    "cuda-ipc",
    "loopback",
    "loopback-device",
    "mooncake",
    "mori",
    "mori-direct",
    "nixl",
    "nixl-direct",
    "nixl-tcp",
    "shm",
    "shm-device",
    "tcp",
    "tcp-device",
]
ASKS_THE_SOURCE = ["loopback", "tcp"]
"""Backends whose source takes part in a read and can refuse it; for the others validate-on-release decides."""


@pytest.fixture(params=TRANSPORTS)
def ends(request, tmp_path):
    with open_ends(request.param, str(tmp_path)) as ends:
        yield ends


@pytest.fixture(params=ASKS_THE_SOURCE)
def asking_ends(request, tmp_path):
    with open_ends(request.param, str(tmp_path)) as ends:
        yield ends


def test_the_suite_covers_every_backend():
    assert {VARIANTS.get(name, (name,))[0] for name in TRANSPORTS} == set(BACKENDS)


def test_records_of_every_size_and_number_arrive_at_unaligned_places(ends, subtests):
    most = 8 << 20
    source, target, peer = ends.connected(num_pages=1, page_bytes=most + 7)
    lease = source.lease([0])
    for size, count in itertools.product([1, 63, 4096, 65536], [1, 17, 4096]):
        with subtests.test(size=size, count=count):
            count = min(count, most // size)
            order = np.random.default_rng(3).permutation(count)
            records = copies((7 + order * size).tolist(), (np.arange(count) * size).tolist(), [size] * count)
            target.bytes[:] = 0
            op = target.read(peer, records, lease)
            target.wait(op)
            assert op.state is OpState.DONE, op.error
            assert op.landed_bytes == op.nbytes == size * count
            expected = source.bytes[7 : 7 + size * count].reshape(count, size)[order].reshape(-1)
            assert np.array_equal(target.bytes[: size * count], expected)
            assert not target.bytes[size * count :].any()


def test_records_of_mixed_sizes_land_in_order_of_the_list(ends):
    source, target, peer = ends.connected()
    # Two records write the same bytes: the later one stands.
    records = copies([0, 5000, 100], [0, 10, 10], [4096, 3, 70000])
    op = target.read(peer, records, source.lease(range(64)))
    target.wait(op)
    expected = np.zeros(len(target.bytes), np.uint8)
    expected[:4096] = source.bytes[:4096]
    expected[10:13] = source.bytes[5000:5003]
    expected[10:70010] = source.bytes[100:70100]
    assert np.array_equal(target.bytes, expected)


def test_a_read_of_no_records_is_done(ends):
    source, target, peer = ends.connected()
    op = target.read(peer, copies([], [], []), source.lease([1]))
    target.wait(op)
    assert op.state is OpState.DONE


OUTSIDE = [
    copies([-1], [0], [10]),
    copies([0], [-1], [10]),
    copies([64 * 4096 - 9], [0], [10]),
    copies([0], [64 * 4096 - 9], [10]),
    copies([0], [0], [0]),
    copies([0], [0], [-5]),
    copies([2**63 - 1], [0], [2**62]),
    copies([0, 0], [0], [1]),
    copies([0], [0], [10], regions=(7, 0)),
    copies([0], [0], [10], regions=(0, 7)),
]


def test_a_read_outside_the_regions_is_refused_and_nothing_is_posted(ends, subtests):
    source, target, peer = ends.connected()
    for number, records in enumerate(OUTSIDE):
        with subtests.test(number=number):
            with pytest.raises(BadRequest):
                target.read(peer, records, source.lease(range(64)))
            assert target.transport.poll() == []
            assert not target.bytes.any()


def test_each_change_of_an_operation_is_polled_once_and_announced(ends):
    source, target, peer = ends.connected()
    op = target.read(peer, copies([0], [0], [4096]), source.lease([0]))
    assert target.news.wait(60)
    assert target.transport.poll() == [op]
    assert target.transport.poll() == []
    assert target.transport.quiesced(op)


def test_many_operations_to_two_sources_all_arrive(ends):
    first, second = ends.source(seed=1), ends.source(seed=2)
    target = ends.target(2 * 64 * 4096)
    peers = [target.transport.connect(end.transport.export(), 5.0) for end in (first, second)]
    leases = [end.lease(range(64)) for end in (first, second)]
    ops = [
        target.read(peers[side], copies([page * 4096], [(side * 64 + page) * 4096], [4096]), leases[side])
        for page in range(32)
        for side in (0, 1)
    ]
    target.wait(*ops)
    assert {op.state for op in ops} == {OpState.DONE}
    assert np.array_equal(target.bytes[: 32 * 4096], first.bytes[: 32 * 4096])
    assert np.array_equal(target.bytes[64 * 4096 : 96 * 4096], second.bytes[: 32 * 4096])


def test_too_many_operations_are_refused_until_one_has_ended(ends):
    source, target, peer = ends.connected(num_pages=256, page_bytes=65536)
    lease = source.lease(range(256))
    whole = copies([0], [0], [256 * 65536])
    limit = target.transport.capabilities.max_ops_in_flight_per_peer
    ops = []
    with pytest.raises(NoCapacity):
        for _ in range(4 * limit):
            ops.append(target.read(peer, whole, lease))
    assert len(ops) >= limit
    for op in ops:
        target.transport.cancel(op)
    target.wait(*ops)
    last = target.read(peer, copies([0], [0], [10]), lease)
    target.wait(last)
    assert last.state is OpState.DONE


def test_a_cancelled_read_that_waits_ends_at_once_and_writes_nothing(ends):
    source, target, peer = ends.connected(num_pages=512, page_bytes=65536)
    lease = source.lease(range(512))
    first = target.read(peer, copies([0], [0], [400 * 65536]), lease)
    second = target.read(peer, copies([400 * 65536], [400 * 65536], [65536]), lease)
    assert isinstance(target.transport, SupportsCancel)
    target.transport.cancel(second)
    target.transport.cancel(first)
    target.wait(first, second)
    assert isinstance(second.error, Aborted) or second.state is OpState.DONE
    if second.state is OpState.FAILED:
        assert not target.bytes[400 * 65536 :].any()


def test_the_peer_is_usable_after_a_cancel(ends):
    source, target, peer = ends.connected(num_pages=512, page_bytes=65536)
    lease = source.lease(range(512))
    for _ in range(5):
        op = target.read(peer, copies([0], [0], [512 * 65536]), lease)
        target.transport.cancel(op)
        target.wait(op)
    last = target.read(peer, copies([65536], [0], [65536]), lease)
    target.wait(last)
    assert last.state is OpState.DONE
    assert np.array_equal(target.bytes[:65536], source.bytes[65536 : 2 * 65536])


def test_cancelling_what_is_over_or_foreign_changes_nothing(ends):
    source, target, peer = ends.connected()
    op = target.read(peer, copies([0], [0], [4096]), source.lease([0]))
    target.wait(op)
    target.transport.cancel(op)
    assert op.state is OpState.DONE


def test_a_read_past_its_deadline_fails_with_proof(ends):
    source, target, peer = ends.connected()
    op = target.read(peer, copies([0], [0], [4096]), source.lease([0]), deadline=ends.clock.now() - 1)
    target.wait(op)
    assert failed(op)


def test_destroying_the_reader_quiesces_everything(ends):
    source, target, peer = ends.connected(num_pages=512, page_bytes=65536)
    lease = source.lease(range(512))
    ops = [target.read(peer, copies([0], [0], [512 * 65536]), lease) for _ in range(8)]
    target.transport.destroy()
    assert all(target.transport.quiesced(op) for op in ops)
    target.bytes[:] = 201
    time.sleep(0.2)  # nothing to wait for: the point is that nothing comes
    assert (target.bytes == 201).all()
    with pytest.raises(TransferFailed):
        target.read(peer, copies([0], [0], [10]), lease)


def test_destroying_twice_is_harmless(ends):
    _, target, _ = ends.connected()
    target.transport.destroy()
    target.transport.destroy()


def test_a_disconnected_peer_takes_no_reads_and_others_go_on(ends):
    source, target, peer = ends.connected()
    other = target.transport.connect(source.transport.export(), 5.0)
    peer.disconnect()
    lease = source.lease([0])
    with pytest.raises(TransferFailed):
        target.read(peer, copies([0], [0], [10]), lease)
    op = target.read(other, copies([0], [0], [10]), lease)
    target.wait(op)
    assert op.state is OpState.DONE


def test_a_source_that_closed_cannot_be_connected(ends):
    source = ends.source()
    info = source.transport.export()
    source.transport.destroy()
    source.memory.close()
    with pytest.raises(TransferFailed):
        ends.target().transport.connect(info, 1.0)


@pytest.mark.parametrize("blob", [b"", b"\x00", b"garbage", b"\x81\xa4host\xa3abc", bytes(2000)])
@pytest.mark.parametrize("name", ["cuda-ipc", "shm", "tcp"])
def test_a_malformed_description_is_refused(name, blob, tmp_path):
    with open_ends(name, str(tmp_path)) as ends, pytest.raises(TransferFailed):
        ends.target().transport.connect(PeerInfo(transport=name, incarnation=fresh_incarnation(), blob=blob), 1.0)


def test_a_transport_without_a_guard_exports_nothing(ends):
    with pytest.raises(ConfigError):
        ends.target().transport.export()


def test_regions_are_checked_when_they_are_registered(ends):
    target = ends.target()
    with allocated(8192) as memory:
        whole = memory.regions[0]
        for bad in (
            MemoryRegion(id=5, address=whole.address, nbytes=0, writable=True),
            MemoryRegion(id=0, address=whole.address, nbytes=10, writable=True),
        ):
            with pytest.raises(ConfigError):
                target.transport.register(bad)
        target.transport.register(MemoryRegion(id=5, address=whole.address, nbytes=4096, writable=True))
        with pytest.raises(ConfigError):
            target.transport.register(MemoryRegion(id=6, address=whole.address + 4095, nbytes=10, writable=True))


def test_a_read_only_region_is_no_target(ends):
    source, target, peer = ends.connected()
    with allocated(8192) as memory:
        target.transport.register(MemoryRegion(id=5, address=memory.regions[0].address, nbytes=8192, writable=False))
        with pytest.raises(BadRequest):
            target.read(peer, copies([0], [0], [10], regions=(0, 5)), source.lease([0]))


def test_an_unknown_lease_reads_nothing(asking_ends):
    source, target, peer = asking_ends.connected()
    source.lease(range(64))
    op = target.read(peer, copies([0], [0], [4096]), LeaseId(99))
    target.wait(op)
    assert isinstance(op.error, LeaseLost)
    assert not target.bytes.any()


def test_a_page_outside_the_lease_is_not_read(asking_ends):
    source, target, peer = asking_ends.connected()
    lease = source.lease(range(10))
    outside = target.read(peer, copies([9 * 4096], [0], [2 * 4096]), lease)
    target.wait(outside)
    assert isinstance(outside.error, LeaseLost)
    assert not target.bytes.any()
    inside = target.read(peer, copies([8 * 4096], [0], [2 * 4096]), lease)
    target.wait(inside)
    assert inside.state is OpState.DONE


def test_a_lease_that_ends_during_the_read_stops_it(asking_ends):
    source, target, peer = asking_ends.connected(num_pages=1024, page_bytes=65536)
    lease = source.lease(range(1024))
    op = target.read(peer, copies([0], [0], [1024 * 65536]), lease)
    while not op.landed_bytes:
        time.sleep(0)
    source.leases.end(lease)
    target.wait(op)
    assert isinstance(op.error, LeaseLost)
    assert op.landed_bytes < op.nbytes


def test_the_source_goes_away_during_a_read(asking_ends):
    source, target, peer = asking_ends.connected(num_pages=1024, page_bytes=65536)
    op = target.read(peer, copies([0], [0], [1024 * 65536]), source.lease(range(1024)))
    source.transport.destroy()
    target.wait(op)
    assert op.state is OpState.DONE or isinstance(op.error, TransferFailed)
    later = None
    try:
        later = target.read(peer, copies([0], [0], [10]), LeaseId(1))
    except TransferFailed:
        return
    target.wait(later)
    assert failed(later)


def test_shared_memory_of_another_host_is_refused(tmp_path):
    with open_ends("shm", str(tmp_path)) as ends:
        info = ends.source().transport.export()
        raw = msgspec.msgpack.decode(info.blob)
        raw["boot_id"] = "another"
        elsewhere = PeerInfo(transport="shm", incarnation=info.incarnation, blob=msgspec.msgpack.encode(raw))
        with pytest.raises(TransferFailed, match="another host"):
            ends.target().transport.connect(elsewhere, 1.0)


def test_private_memory_cannot_be_served_by_shm(tmp_path):
    with allocated(4096) as memory, open_ends("shm", str(tmp_path)) as ends:
        transport = open_transport(
            "shm", TransportSettings(fresh_incarnation(), ends.config), ends.source().leases, ends.clock, lambda: None
        )
        transport.register(memory.regions[0])
        with pytest.raises(ConfigError, match="shared memory"):
            transport.export()


def test_a_wrong_token_or_incarnation_reads_nothing_over_tcp(tmp_path):
    with open_ends("tcp", str(tmp_path)) as ends:
        info = ends.source().transport.export()
        raw = msgspec.msgpack.decode(info.blob)
        target = ends.target()
        guess = msgspec.msgpack.encode(raw | {"token": bytes(32)})
        for wrong in (
            PeerInfo(transport="tcp", incarnation=info.incarnation, blob=guess),
            PeerInfo(transport="tcp", incarnation=fresh_incarnation(), blob=info.blob),
        ):
            with pytest.raises(TransferFailed):
                target.transport.connect(wrong, 1.0)
        target.transport.connect(info, 1.0)


def test_an_unknown_transport_is_named_in_the_error():
    with pytest.raises(ConfigError, match="infiniband"):
        open_transport("infiniband", TransportSettings(fresh_incarnation(), TransferConfig()), None, None, lambda: None)


class allocated:
    def __init__(self, nbytes: int):
        self.memory = allocate([nbytes], incarnation=fresh_incarnation())

    def __enter__(self):
        return self.memory

    def __exit__(self, *_):
        self.memory.close()
