"""Pools on a (fake) device: no CPU instruction touches them, and every way between pools moves the right bytes."""

import logging

import pytest

from core.errors import ConfigError, TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.api import MemoryRegion
from kv_transfer.backends.cuda_driver import CudaDriver
from kv_transfer.backends.regions import RegionTable
from kv_transfer.device_memory import allocate_on_device
from kv_transfer.memory import region_view
from kv_transfer.staging import Staging
from kv_transfer.views import views_of
from tests.fakes.fake_cuda import FakeCuda, device_bytes
from tests.fakes.kv_pair import open_pair, quick
from tests.fakes.kv_pools import make_layout, make_request


def at(number: int, device: int = 0) -> MemoryRegion:
    return MemoryRegion(id=number, address=1 << 40, nbytes=4096, writable=True, device=device)


ON_DEVICE = at(2)
WAYS = [
    ("cuda-ipc", "both"),
    ("loopback", "both"),
    ("shm", "target"),
    ("tcp", "both"),
    ("tcp", "source"),
    ("tcp", "target"),
    ("auto", "both"),
    ("auto", "source"),
    ("auto", "target"),
]


class NoSharing(FakeCuda):
    """A driver in a place where no other process may map its memory."""

    def share(self, device, address):
        raise TransferFailed("cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED")


def test_memory_of_a_device_has_no_view_in_place():
    table = RegionTable()
    table.add(ON_DEVICE)
    assert views_of([ON_DEVICE], None) == table.views == {}
    with pytest.raises(AssertionError):
        region_view(ON_DEVICE)


def test_row_state_on_a_device_needs_a_driver_and_one_place():
    layout = make_layout(num_pages=8)
    with pytest.raises(ConfigError, match="no driver to move it"):
        Staging(layout, [ON_DEVICE], 2, 1 << 20, fresh_incarnation())
    with pytest.raises(ConfigError, match="on several devices"):
        Staging(layout, [ON_DEVICE, at(3, device=1)], 2, 1 << 20, fresh_incarnation())
    staging = Staging(make_layout(num_pages=8, rows=False), [at(0)], 2, 1 << 20, fresh_incarnation())
    assert not staging.needed
    staging.close()


def test_without_a_driver_the_transport_says_so(monkeypatch):
    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", none)
    with pytest.raises(ConfigError, match=r"no usable CUDA driver.*libcuda\.so\.1"):
        CudaDriver()


def test_device_memory_is_zeroed_whole_and_given_back_once(tmp_path):
    cuda = FakeCuda(str(tmp_path))
    memory = allocate_on_device([4096, 100], cuda=cuda, device=0)
    assert [region.nbytes for region in memory.regions] == [4096, 100]
    assert not any(device_bytes(region).any() for region in memory.regions)
    memory.close()
    memory.close()
    assert not cuda.allocations


def test_a_pool_that_does_not_fit_says_what_to_lower_and_keeps_nothing(tmp_path):
    cuda = FakeCuda(str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs 1536\.0 MiB on GPU 0.*of 1024\.0.*lower engine\.num_pages"):
        allocate_on_device([768 << 20, 768 << 20], cuda=cuda, device=0)
    assert not cuda.allocations


@pytest.mark.parametrize(("transport", "where"), WAYS, ids="-".join)
@pytest.mark.parametrize("digests", [False, True], ids=["", "digests"])
async def test_a_hand_over_between_any_pools_lands_every_byte(tmp_path, transport, where, digests):
    cuda = FakeCuda(str(tmp_path))
    source, target = (cuda if where in ("both", end) else None for end in ("source", "target"))
    async with open_pair(
        transport, str(tmp_path), config=quick(digests=digests), source_cuda=source, target_cuda=target
    ) as pair:
        for seq, tokens in enumerate((200, 31), 1):
            request = make_request(tokens, f"req-{seq}")
            await pair.pull(request, seq=seq, row=seq)
            pair.host.assert_landed(seq, request, row=seq)
            pair.host.release(seq)
        await pair.settled()
        name = {"both": "cuda-ipc", "source": "tcp", "target": "shm"}[where] if transport == "auto" else transport
        assert pair.destination.statistics()[f"bytes_landed_{name}"] == pair.bytes_landed > 0
    assert not cuda.allocations, "device memory outlived its workers"
    assert not cuda.maps, "the peer's memory is still mapped"


async def test_a_device_that_cannot_be_shared_goes_through_host_memory_and_says_so(tmp_path, caplog):
    cuda = NoSharing(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        async with open_pair("auto", str(tmp_path), source_cuda=cuda, target_cuda=cuda) as pair:
            request = make_request(100)
            await pair.pull(request)
            pair.host.assert_landed(1, request, row=1)
            assert pair.destination.statistics()["bytes_landed_tcp"] > 0
    assert "KV transport cuda-ipc is not served" in caplog.text


async def test_a_transport_that_cannot_serve_a_device_is_refused_by_name(tmp_path):
    cuda = FakeCuda(str(tmp_path))
    with pytest.raises(ConfigError, match="not in shared memory"):
        async with open_pair("shm", str(tmp_path), source_cuda=cuda, target_cuda=cuda):
            pass


async def test_a_read_from_device_to_device_holds_several_times_the_bytes(tmp_path):
    cuda = FakeCuda(str(tmp_path))
    reads = {}
    for transport in ("cuda-ipc", "tcp"):
        config = quick(max_bytes_per_op=4096, max_run_bytes=4096)
        async with open_pair(
            transport, str(tmp_path), config=config, source_cuda=cuda, target_cuda=cuda, chunk_tokens=400
        ) as pair:
            request = make_request(400)
            await pair.pull(request)
            pair.host.assert_landed(1, request, row=1)
            reads[transport] = pair.destination.statistics()[f"reads_{transport}"]
    assert 0 < 2 * reads["cuda-ipc"] <= reads["tcp"]
