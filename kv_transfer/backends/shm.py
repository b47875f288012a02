"""Reads from a peer on the same host: its pool is a shared segment, mapped read-only here, and we copy out of it.

The source takes no part in a read, so it cannot be harmed by a reader's death, and it cannot refuse one either: what
was read under a lapsed lease is caught by validate-on-release. When the source dies the mapping stays valid and stale.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from core.clock import Clock
from core.errors import ConfigError, TransferFailed
from kv_transfer.api import Capabilities, PeerInfo, Records, SourceGuard
from kv_transfer.backends.copying import copy_in_steps
from kv_transfer.backends.lane import Job
from kv_transfer.backends.lane_transport import LanePeer, LaneTransport, Shared
from kv_transfer.memory import U8, map_segment
from kv_transfer.settings import TransportSettings

CAPABILITIES = Capabilities(
    name="shm",
    version="1",
    max_records_per_op=4096,
    max_bytes_per_op=1 << 30,
    max_ops_in_flight_per_peer=64,
    same_host_only=True,
    read_is_safe_for_source=True,
    cancel_is_fence=True,
    landing="direct",
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ShmRegion(msgspec.Struct, frozen=True, array_like=True):
    """Where one region lies in a segment."""

    id: int
    nbytes: int
    segment: str
    offset: int


class ShmExport(msgspec.Struct, frozen=True, kw_only=True):
    """The blob of this transport."""

    boot_id: str
    regions: tuple[ShmRegion, ...]


class ShmPeer(LanePeer):
    """A source whose segments are mapped here."""

    def __init__(self, info: PeerInfo, shared: Shared, views: dict[int, U8]) -> None:
        self._views = views
        self._sizes = {region: len(view) for region, view in views.items()}
        super().__init__(info, shared)

    def source_sizes(self) -> Mapping[int, int]:
        return self._sizes

    def read(self, job: Job) -> None:
        def before_step(part: Records) -> None:  # noqa: ARG001 - the source's pages cannot be asked for
            job.check(self.shared.clock)

        copy_in_steps(
            job,
            self._views[job.records.source_region],
            self.shared.regions.views[job.records.target_region],
            self.shared.config.step_bytes,
            before_step,
        )

    def disconnect(self) -> None:
        super().disconnect()
        # The mappings go with the last view of them.
        self._views.clear()


class ShmTransport(LaneTransport):
    """See the module."""

    def __init__(
        self, settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
    ) -> None:
        super().__init__(CAPABILITIES, settings, guard, clock, on_event)

    def _serve(self, guard: SourceGuard) -> bytes:
        del guard  # readers come without asking
        regions = self._shared.regions.regions.values()
        private = [region.id for region in regions if not region.shared_name]
        if private:
            raise ConfigError(f"KV region {private[0]} is not in shared memory, so the shm transport cannot serve it")
        export = ShmExport(
            boot_id=boot_id(),
            regions=tuple(ShmRegion(r.id, r.nbytes, r.shared_name, r.shared_offset) for r in regions),
        )
        return msgspec.msgpack.encode(export)

    def _stop_serving(self) -> None:
        pass

    def _open_peer(self, info: PeerInfo, timeout_s: float) -> ShmPeer:
        del timeout_s  # mapping does not wait
        try:
            export = msgspec.msgpack.decode(info.blob, type=ShmExport)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TransferFailed(f"the peer's shm description cannot be read: {error}") from error
        if export.boot_id != boot_id():
            raise TransferFailed("the peer runs on another host")
        return ShmPeer(info, self._shared, map_regions(export.regions, self._shared.config.segment_directory))


def map_regions(regions: Iterable[ShmRegion], directory: str) -> dict[int, U8]:
    """Map a peer's regions read-only; raises TransferFailed. The mappings go with the last view of them."""
    segments: dict[str, mmap.mmap] = {}
    views: dict[int, U8] = {}
    for region in regions:
        if region.segment not in segments:
            try:
                segments[region.segment] = map_segment(directory, region.segment)
            except (OSError, ValueError) as error:
                raise TransferFailed(f"the peer's segment cannot be mapped: {error}") from error
        whole = np.frombuffer(segments[region.segment], np.uint8)
        if region.offset < 0 or region.nbytes <= 0 or region.offset + region.nbytes > len(whole):
            raise TransferFailed(f"the peer's region {region.id} lies outside its segment")
        views[region.id] = whole[region.offset : region.offset + region.nbytes]
    return views


def boot_id() -> str:
    """Return what tells this host (and this start of it) from others."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        raise ConfigError(f"the host has no boot id, so shm cannot tell hosts apart: {error.strerror}") from error


def open_transport(
    settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
) -> ShmTransport:
    """Open the shared-memory transport."""
    return ShmTransport(settings, guard, clock, on_event)
