"""Reads of a peer's device memory on the same host: its allocations are mapped by CUDA IPC, and we copy out of them.

As with shm, the source takes no part in a read. Device memory must come from plain allocations (cudaMalloc); pools that
grow by remapping cannot be shared this way. Regions in shared host segments are served beside them.
"""

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from core.clock import Clock
from core.errors import ConfigError, TransferFailed
from kv_transfer.api import HOST, Capabilities, MemoryRegion, PeerInfo, Records, SourceGuard
from kv_transfer.backends.cuda_driver import CudaDriver
from kv_transfer.backends.lane import Job
from kv_transfer.backends.lane_transport import LanePeer, LaneTransport, Shared
from kv_transfer.backends.shm import ShmRegion, boot_id, map_regions
from kv_transfer.device import HANDLE_BYTES, Cuda
from kv_transfer.memory import U8
from kv_transfer.plan import split
from kv_transfer.settings import TransportSettings

CAPABILITIES = Capabilities(
    name="cuda-ipc",
    version="1",
    max_records_per_op=4096,
    max_bytes_per_op=1 << 30,
    max_ops_in_flight_per_peer=64,
    same_host_only=True,
    read_is_safe_for_source=True,
    cancel_is_fence=True,
    op_scale=4,
    landing="direct",
)
STEP_BYTES = 128 << 20
"""A read looks for cancellation this often: less than half a millisecond of the link between two H200s."""


class DeviceRegion(msgspec.Struct, frozen=True, array_like=True):
    """Where one region lies in an allocation of a device."""

    id: int
    nbytes: int
    device: bytes
    """UUID."""
    handle: bytes
    offset: int


class CudaExport(msgspec.Struct, frozen=True, kw_only=True):
    """The blob of this transport."""

    boot_id: str
    devices: tuple[DeviceRegion, ...]
    segments: tuple[ShmRegion, ...]


class CudaPeer(LanePeer):
    """A source whose allocations are mapped here."""

    def __init__(self, info: PeerInfo, shared: Shared, cuda: Cuda, export: CudaExport) -> None:
        self._cuda = cuda
        ours = (region.device for region in shared.regions.regions.values() if region.device != HOST)
        self._ours = next(ours, None)
        self._handles: list[tuple[int, bytes]] = []
        self._addresses: dict[int, int] = {}
        self._sizes = {region.id: region.nbytes for region in (*export.devices, *export.segments)}
        try:
            self._views: dict[int, U8] = map_regions(export.segments, shared.config.segment_directory)
            self._addresses.update({i: int(view.ctypes.data) for i, view in self._views.items()})
            for region in export.devices:
                self._map(region)
        except TransferFailed:
            self._unmap()
            raise
        self._device = self._handles[0][0]
        super().__init__(info, shared)

    def source_sizes(self) -> Mapping[int, int]:
        return self._sizes

    def read(self, job: Job) -> None:
        records = job.records
        source, ours = self._addresses[records.source_region], self.shared.regions.regions[records.target_region]
        target = ours.address
        on_devices = ours.device != HOST and records.source_region not in self._views
        for part in split(records, CAPABILITIES.max_records_per_op, STEP_BYTES):
            job.check(self.shared.clock)
            columns = (part.target_offsets + target, part.source_offsets + source, part.nbytes)
            if on_devices and _are_apart(part):
                self._cuda.copy_apart(self._device, *columns, blocks=self.shared.config.gather_blocks)
            else:
                self._cuda.copy(self._device, zip(*(column.tolist() for column in columns), strict=True))
            job.op.landed_bytes += part.total_bytes

    def disconnect(self) -> None:
        super().disconnect()
        self._unmap()

    def _map(self, region: DeviceRegion) -> None:
        theirs = self._cuda.find(region.device)
        if theirs is None or len(region.handle) != HANDLE_BYTES:
            raise TransferFailed("the peer's GPU is not visible to this process")
        # Mapped on our GPU, its copy engine reads over the link between the two; without one on its own.
        device = theirs if self._ours is None else self._ours
        base = self._cuda.map(device, region.handle)
        self._handles.append((device, region.handle))
        self._addresses[region.id] = base + region.offset

    def _unmap(self) -> None:
        while self._handles:
            self._cuda.unmap(*self._handles.pop())
        self._addresses.clear()


def _are_apart(records: Records) -> bool:
    """True if no two copies write the same byte, so that their order does not matter."""
    order = np.argsort(records.target_offsets)
    starts, sizes = records.target_offsets[order], records.nbytes[order]
    return bool((starts[:-1] + sizes[:-1] <= starts[1:]).all())


class CudaTransport(LaneTransport):
    """See the module."""

    def __init__(
        self, settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
    ) -> None:
        self._cuda = settings.cuda or CudaDriver()
        super().__init__(CAPABILITIES, settings, guard, clock, on_event)

    def _serve(self, guard: SourceGuard) -> bytes:
        del guard  # readers come without asking
        regions = self._shared.regions.regions.values()
        private = [region.id for region in regions if region.device == HOST and not region.shared_name]
        if private:
            raise ConfigError(f"KV region {private[0]} is neither on a GPU nor shared, so cuda-ipc cannot serve it")
        on_device = tuple(self._share(region) for region in regions if region.device != HOST)
        if not on_device:
            raise ConfigError("no KV region is on a GPU; use shm instead of cuda-ipc")
        segments = tuple(ShmRegion(r.id, r.nbytes, r.shared_name, r.shared_offset) for r in regions if r.device == HOST)
        return msgspec.msgpack.encode(CudaExport(boot_id=boot_id(), devices=on_device, segments=segments))

    def _share(self, region: MemoryRegion) -> DeviceRegion:
        try:
            handle, offset = self._cuda.share(region.device, region.address)
        except TransferFailed as error:
            raise ConfigError(
                f"KV region {region.id} cannot be shared with other processes ({error.message}); "
                "allocate it plainly, not from expandable segments"
            ) from error
        return DeviceRegion(region.id, region.nbytes, self._cuda.uuid(region.device), handle, offset)

    def _stop_serving(self) -> None:
        pass

    def _open_peer(self, info: PeerInfo, timeout_s: float) -> CudaPeer:
        del timeout_s  # mapping does not wait
        try:
            export = msgspec.msgpack.decode(info.blob, type=CudaExport)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TransferFailed(f"the peer's CUDA description cannot be read: {error}") from error
        if export.boot_id != boot_id():
            raise TransferFailed("the peer runs on another host")
        if not export.devices:
            raise TransferFailed("the peer has no region on a GPU")
        return CudaPeer(info, self._shared, self._cuda, export)


def open_transport(
    settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
) -> CudaTransport:
    """Open the device-memory transport; raises ConfigError where there is no CUDA driver."""
    return CudaTransport(settings, guard, clock, on_event)
