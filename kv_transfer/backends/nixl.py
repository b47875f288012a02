"""The ``nixl`` transport: NIXL over direct memory access on one host, over RDMA, or over TCP in a sidecar.

Over TCP the death of a reader can take the process down that holds the memory, so there both are sidecars. Over direct
memory access (CMA) a reader needs none: the kernel copies, and the source takes no part.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from core.clock import Clock
from core.errors import TransferFailed
from kv_transfer.api import HOST, Capabilities, MemoryRegion, SourceGuard
from kv_transfer.backends.cma import denied
from kv_transfer.backends.native_peer import NativeExport
from kv_transfer.backends.native_transport import NativeTransport, Way, needs_shared
from kv_transfer.backends.nixl_engine import decode_export
from kv_transfer.backends.nixl_library import find_version
from kv_transfer.config import TransferConfig
from kv_transfer.settings import TransportSettings

_ADAPTERS = Path("/sys/class/infiniband")


class NixlPlan:
    """See `NativePlan`. `has_rdma` and `cma_denied(pid, address)` look at the host."""

    module = "kv_transfer.backends.nixl_engine"

    def __init__(
        self, version: str, landing: str, has_rdma: Callable[[], bool], cma_denied: Callable[[int, int], str]
    ) -> None:
        self.capabilities = Capabilities(
            name="nixl",
            version=version,
            max_records_per_op=4096,
            max_bytes_per_op=1 << 30,
            max_ops_in_flight_per_peer=64,
            same_host_only=False,
            read_is_safe_for_source=True,
            cancel_is_fence=landing != "direct",
            landing=landing,
        )
        self._has_rdma = has_rdma
        self._cma_denied = cma_denied

    def serve(self, regions: Sequence[MemoryRegion], config: TransferConfig) -> Way:
        if any(region.device != HOST for region in regions):
            # No sidecar can map a pool on a GPU; between processes of one host UCX copies by CUDA IPC.
            return _way("rdma" if self._has_rdma() else "cuda", sidecar=False)
        if config.native_lane in ("auto", "rdma") and self._has_rdma():
            return _way("rdma", sidecar=False)
        needs_shared(regions, "nixl")
        # An agent that knows nothing but sockets cannot be read directly, however near the reader is.
        lane = "tcp" if config.native_lane == "tcp" else "any"
        return Way("tcp", sidecar=True, options={"lane": lane})

    def reach(self, export: NativeExport, here: str, config: TransferConfig) -> Way:
        wanted, direct = config.native_lane, config.landing == "direct"
        in_steps = config.landing != "staged"
        if export.lane == "cuda":
            if export.host != here:
                raise TransferFailed("the source's GPU memory can only be read on its own host: it has no RDMA adapter")
            return _way("cuda", sidecar=False, direct=True, worse="cuda-ipc is many times faster within a host")
        denied = self._why_not_cma(export, here)
        if wanted in ("auto", "cma") and not denied:
            return _way("cma", sidecar=False, direct=in_steps, in_steps=in_steps)
        if wanted == "cma":
            raise TransferFailed(f"transfer.native_lane is cma, but {denied}")
        if export.lane == "rdma" or wanted == "rdma":
            if export.lane == "rdma" and self._has_rdma():
                return _way("rdma", sidecar=False, direct=direct)
            # Over TCP our death could take the source down: it serves from its own process.
            raise TransferFailed("RDMA needs an adapter on both sides")
        same_host = export.host == here
        return _way("tcp", sidecar=True, worse=f"slow sockets on one host, {denied}" if same_host and denied else "")

    def _why_not_cma(self, export: NativeExport, here: str) -> str:
        if export.host != here:
            return "the source is on another host"
        engine = decode_export(export.engine)
        if not engine.regions:
            return "the source serves no memory"
        reason = self._cma_denied(engine.pid, engine.regions[0][1])
        # UCX would silently use sockets.
        hint = "allow process_vm_readv: same user, ptrace_scope 0, a seccomp profile that permits it"
        return f"its memory cannot be read directly ({reason}; {hint})" if reason else ""


def _way(lane: str, *, sidecar: bool, direct: bool = False, in_steps: bool = False, worse: str = "") -> Way:
    return Way(lane, sidecar, direct, {"lane": lane}, worse, in_steps)


def has_rdma() -> bool:
    """True if the host has a network card that NIXL can use without sockets."""
    return _ADAPTERS.is_dir() and any(_ADAPTERS.iterdir())


def open_transport(
    settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
) -> NativeTransport:
    """Open the nixl transport; raises ConfigError if no usable NIXL wheel is installed."""
    _, version = find_version()
    plan = NixlPlan(version, settings.config.landing, has_rdma, denied)
    return NativeTransport(plan, settings, guard, clock, on_event)
