"""Two ends of one transport, as the contract suite drives them: a leased source and a reader with memory to land in."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import msgspec
import numpy as np
import pytest

from core.clock import Clock, SystemClock
from core.ids import Incarnation, LeaseId, TransferId, fresh_incarnation
from core.kv import Component, ComponentKind, KVLayout
from kv_transfer.api import HOST, Op, OpState, Peer, Records, Transport
from kv_transfer.config import TransferConfig
from kv_transfer.device_memory import DeviceMemory, allocate_on_device
from kv_transfer.exchange import Exchange
from kv_transfer.factory import TransportFactory
from kv_transfer.lease import LeaseTable
from kv_transfer.memory import RegionMemory, allocate, region_view
from kv_transfer.settings import TransportSettings
from tests.fakes.fake_cuda import FakeCuda, device_bytes
from tests.fakes.fake_mori import FakeMori

FOREVER = 1e9
NATIVE = {"mooncake": "mooncake.engine"}
"""Modules from elsewhere without which a transport cannot run."""
VARIANTS = {
    "nixl-tcp": ("nixl", {"native_lane": "tcp"}),
    "nixl-direct": ("nixl", {"landing": "direct"}),
    "mori-direct": ("mori", {"landing": "direct"}),
    "loopback-device": ("loopback", {}),
    "shm-device": ("shm", {}),
    "tcp-device": ("tcp", {}),
}
"""Ways of one transport that the suites treat as transports of their own: (name, settings)."""
ON_DEVICE = {"cuda-ipc": "both", "loopback-device": "both", "tcp-device": "both", "shm-device": "target"}
"""Which ends have their pool on a (fake) device."""


def flat_layout(num_pages: int, page_bytes: int) -> KVLayout:
    """One paged component that fills region 0."""
    page = Component(
        name="kv",
        kind=ComponentKind.PAGED,
        record_bytes=page_bytes,
        num_records=num_pages,
        stride_bytes=page_bytes,
        capacity_tokens=16,
    )
    return KVLayout(page_tokens=16, components=(page,))


def copies(source: list[int], target: list[int], nbytes: list[int], regions: tuple[int, int] = (0, 0)) -> Records:
    return Records(*regions, *(np.array(column, np.int64).reshape(-1) for column in (source, target, nbytes)))


@dataclass
class SourceEnd:
    """Exports `memory` under `leases`."""

    transport: Transport
    memory: RegionMemory | DeviceMemory
    leases: LeaseTable
    incarnation: Incarnation

    @property
    def bytes(self) -> np.ndarray:
        return bytes_of(self.memory)

    def lease(self, pages: range | list[int], ttl_s: float = FOREVER) -> LeaseId:
        lease, _ = self.leases.grant(fresh_incarnation(), TransferId("t"), ttl_s)
        assert self.leases.extend(lease, list(pages))
        return lease


@dataclass
class TargetEnd:
    """Reads into `memory`."""

    transport: Transport
    memory: RegionMemory | DeviceMemory
    news: threading.Event

    @property
    def bytes(self) -> np.ndarray:
        return bytes_of(self.memory)

    def read(self, peer: Peer, records: Records, lease: LeaseId, deadline: float = FOREVER) -> Op:
        return self.transport.submit(peer, records, TransferId("t"), lease, deadline)

    def wait(self, *ops: Op, timeout_s: float = 60.0) -> None:
        """Until all are proven over; by events, as a user of the transport waits."""
        end = time.monotonic() + timeout_s
        while not all(self.transport.quiesced(op) for op in ops):
            assert self.news.wait(max(0.0, end - time.monotonic())), "the operation did not end in time"
            self.news.clear()
            self.transport.poll()


class Ends:
    """Makes ends of one transport; closes what it made."""

    def __init__(self, name: str, directory: str, *, config: TransferConfig | None = None, clock: Clock | None = None):
        self.name, settings = VARIANTS.get(name, (name, {}))
        self.on_device = ON_DEVICE.get(name, "")
        self.directory = directory
        self.exchange = Exchange()
        self.cuda = FakeCuda(directory)
        if self.name == "mori":
            sys.modules |= {"mori": ModuleType("mori"), "mori.io": FakeMori()}
        small_ring = {"landing_ring_bytes": 8 << 20, "landing_slot_bytes": 1 << 20}
        config = config or TransferConfig(segment_directory=directory, progress_timeout_s=2.0)
        self.config = msgspec.structs.replace(config, **small_ring, **settings)
        self.clock = clock or SystemClock()
        self._close = [_forget_mori]

    def source(self, num_pages: int = 64, page_bytes: int = 4096, seed: int = 1) -> SourceEnd:
        incarnation = fresh_incarnation()
        memory = self._allocate(num_pages * page_bytes, self.on_device == "both", incarnation, self.directory)
        bytes_of(memory)[:] = np.random.default_rng(seed).integers(0, 256, num_pages * page_bytes, dtype=np.uint8)
        leases = LeaseTable(
            layout=flat_layout(num_pages, page_bytes), clock=self.clock, max_per_peer=1000, orphan_ttl_s=FOREVER
        )
        transport = self._open(incarnation, memory, leases)
        self._close += [transport.destroy, memory.close]
        return SourceEnd(transport, memory, leases, incarnation)

    def target(self, nbytes: int = 64 * 4096) -> TargetEnd:
        memory = self._allocate(nbytes, bool(self.on_device), fresh_incarnation())
        news = threading.Event()
        transport = self._open(fresh_incarnation(), memory, None, news)
        self._close += [transport.destroy, memory.close]
        return TargetEnd(transport, memory, news)

    def connected(self, **sizes: int) -> tuple[SourceEnd, TargetEnd, Peer]:
        source = self.source(**sizes)
        target = self.target(len(source.bytes))
        return source, target, target.transport.connect(source.transport.export(), 5.0)

    def close(self) -> None:
        for end in self._close:
            end()

    def _allocate(
        self, nbytes: int, on_device: bool, incarnation: Incarnation, directory: str = ""
    ) -> RegionMemory | DeviceMemory:
        if on_device:
            return allocate_on_device([nbytes], cuda=self.cuda, device=0)
        return allocate([nbytes], incarnation=incarnation, directory=directory)

    def _open(
        self,
        incarnation: Incarnation,
        memory: RegionMemory | DeviceMemory,
        leases: LeaseTable | None,
        news: threading.Event | None = None,
    ) -> Transport:
        settings = TransportSettings(incarnation, self.config, self.exchange, self.cuda)
        on_event = news.set if news is not None else (lambda: None)
        return TransportFactory(settings, memory.regions, self.clock).open(self.name, leases, on_event)


def bytes_of(memory: RegionMemory | DeviceMemory) -> np.ndarray:
    """The bytes of the first region, wherever it is."""
    region = memory.regions[0]
    return region_view(region) if region.device == HOST else device_bytes(region)


def require(name: str) -> None:
    """Skip the test, saying why, where the native library of a transport cannot be loaded."""
    library = NATIVE.get(VARIANTS.get(name, (name,))[0])
    if library is not None:
        pytest.importorskip(library, reason=f"{name} needs {library}; see README", exc_type=ImportError)


def _forget_mori() -> None:
    for module in ("mori.io", "mori"):
        sys.modules.pop(module, None)


@contextmanager
def open_ends(name: str, directory: str, **options) -> Iterator[Ends]:
    require(name)
    ends = Ends(name, directory, **options)
    try:
        yield ends
    finally:
        ends.close()


def failed(op: Op) -> bool:
    return op.state is OpState.FAILED and op.error is not None
