"""The ``mooncake`` transport: Mooncake's transfer engine, over TCP in a sidecar on both sides, or over RDMA.

The library gives no proof of a failure, so reads land in the ring and killing the sidecar is the fence. Its ports are
open to whoever can reach the host and take no credentials: keep them on a private network.
"""

from collections.abc import Callable, Sequence

from core.clock import Clock
from core.errors import TransferFailed
from kv_transfer.api import Capabilities, MemoryRegion, SourceGuard
from kv_transfer.backends.mooncake_engine import MAX_DESCRIPTORS, check_version, has_adapter, installed_version
from kv_transfer.backends.native_peer import NativeExport
from kv_transfer.backends.native_transport import NativeTransport, Way, needs_shared
from kv_transfer.config import TransferConfig
from kv_transfer.settings import TransportSettings


class MooncakePlan:
    """See `NativePlan`."""

    module = "kv_transfer.backends.mooncake_engine"

    def __init__(self, version: str, has_rdma: Callable[[], bool]) -> None:
        self.capabilities = Capabilities(
            name="mooncake",
            version=version,
            max_records_per_op=MAX_DESCRIPTORS,
            max_bytes_per_op=1 << 30,
            max_ops_in_flight_per_peer=64,
            same_host_only=False,
            read_is_safe_for_source=True,
            cancel_is_fence=True,
            landing="staged",
        )
        self._has_rdma = has_rdma

    def serve(self, regions: Sequence[MemoryRegion], config: TransferConfig) -> Way:
        if config.native_lane in ("auto", "rdma") and self._has_rdma():
            return _way("rdma")
        needs_shared(regions, "mooncake")
        return _way("tcp")

    def reach(self, export: NativeExport, here: str, config: TransferConfig) -> Way:
        del here  # the library knows no shorter way within a host
        if export.lane == "rdma" and not self._has_rdma():
            raise TransferFailed("the source serves over RDMA, and there is no adapter here")
        if config.native_lane == "rdma" and export.lane != "rdma":
            raise TransferFailed("transfer.native_lane is rdma, but the source serves over tcp")
        return _way(export.lane)


def _way(lane: str) -> Way:
    return Way(lane, sidecar=lane == "tcp", options={"protocol": lane})


def open_transport(
    settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
) -> NativeTransport:
    """Open the mooncake transport; raises ConfigError, saying what to install, if there is no usable wheel."""
    version = installed_version()
    check_version(version)
    return NativeTransport(MooncakePlan(version, has_adapter), settings, guard, clock, on_event)
