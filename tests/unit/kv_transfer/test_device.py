"""Regions on a device: nothing of ours touches them with the CPU."""

import msgspec
import pytest

from core.errors import ConfigError
from core.ids import fresh_incarnation
from kv_transfer.api import MemoryRegion
from kv_transfer.backends.cuda_driver import CudaDriver
from kv_transfer.backends.regions import RegionTable
from kv_transfer.memory import host_views, region_view
from kv_transfer.staging import Staging
from tests.fakes.kv_pools import make_layout


def at(number: int) -> MemoryRegion:
    return MemoryRegion(id=number, address=1 << 40, nbytes=4096, writable=True, device=0)


ON_DEVICE = at(2)


def test_memory_of_a_device_has_no_view():
    table = RegionTable()
    table.add(ON_DEVICE)
    assert host_views([ON_DEVICE]) == table.views == {}
    with pytest.raises(AssertionError):
        region_view(ON_DEVICE)


def test_row_state_on_a_device_is_refused_at_the_start_and_pages_are_not():
    layout = make_layout(num_pages=8)
    with pytest.raises(ConfigError, match="row state ring is on a GPU"):
        Staging(layout, [ON_DEVICE], 2, 1 << 20, fresh_incarnation())
    pages = msgspec.structs.replace(layout, components=layout.components[:1])
    staging = Staging(pages, [at(0)], 2, 1 << 20, fresh_incarnation())
    assert not staging.needed
    staging.close()


def test_without_a_driver_the_transport_says_so(monkeypatch):
    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", none)
    with pytest.raises(ConfigError, match=r"no usable CUDA driver.*libcuda\.so\.1"):
        CudaDriver()
