"""The ``mori`` transport: MORI-IO over RDMA on AMD hosts, in the worker's own process.

Not run on real hardware yet: the suites hold it to the contract over a fake of its library.
"""

from collections.abc import Callable, Sequence

from core.clock import Clock
from kv_transfer.api import Capabilities, MemoryRegion, SourceGuard
from kv_transfer.backends.mori_engine import load_library
from kv_transfer.backends.native_peer import NativeExport
from kv_transfer.backends.native_transport import NativeTransport, Way
from kv_transfer.config import TransferConfig
from kv_transfer.settings import TransportSettings


class MoriPlan:
    """See `NativePlan`."""

    module = "kv_transfer.backends.mori_engine"

    def __init__(self, landing: str) -> None:
        self.capabilities = Capabilities(
            name="mori",
            version="1",
            max_records_per_op=4096,
            max_bytes_per_op=1 << 30,
            max_ops_in_flight_per_peer=64,
            same_host_only=False,
            read_is_safe_for_source=True,
            cancel_is_fence=landing != "direct",
            landing=landing,
        )

    def serve(self, regions: Sequence[MemoryRegion], config: TransferConfig) -> Way:
        del regions, config
        return Way("rdma", sidecar=False)

    def reach(self, export: NativeExport, here: str, config: TransferConfig) -> Way:
        del export, here
        return Way("rdma", sidecar=False, direct=config.landing == "direct")


def open_transport(
    settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
) -> NativeTransport:
    """Open the mori transport; raises ConfigError where the library cannot be loaded."""
    load_library()
    return NativeTransport(MoriPlan(settings.config.landing), settings, guard, clock, on_event)
