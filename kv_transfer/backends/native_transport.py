"""A `Transport` over native engines: lanes of reads, one serving engine, engines opened anew after a crash or a fence.

A backend says, as a `NativePlan`, which engine it uses and by which way to a peer: in this process or in a sidecar,
through the landing ring or straight into the regions.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from core.clock import Clock
from core.errors import ConfigError, TransferFailed
from core.ids import fresh_incarnation
from kv_transfer.api import Capabilities, MemoryRegion, PeerInfo, SourceGuard
from kv_transfer.backends.landing import Landing
from kv_transfer.backends.lane_transport import LanePeer, LaneTransport
from kv_transfer.backends.native import EngineSpec, NativeEngine, open_engine
from kv_transfer.backends.native_peer import PROBE_BYTES, DirectPeer, NativeExport, NativePeer, StagedPeer
from kv_transfer.backends.revival import Revival
from kv_transfer.backends.sidecar import Sidecar
from kv_transfer.config import TransferConfig
from kv_transfer.settings import TransportSettings

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine runs for one use."""

    lane: str
    """For logs and metrics: what carries the bytes."""
    sidecar: bool
    direct: bool = False
    options: Mapping[str, str] = field(default_factory=dict, compare=False)
    worse: str = ""
    """Why it is not the way that one would expect here; it is logged as a warning and counted."""
    in_steps: bool = False
    """The library moves all bytes inside the call that starts a read: one read at a time, of `transfer.step_bytes`."""


class NativePlan(Protocol):
    """What a backend decides. Pure but for looking at the host."""

    module: str
    """With `open_engine`."""
    capabilities: Capabilities

    def serve(self, regions: Sequence[MemoryRegion], config: TransferConfig) -> Way:
        """Return how our memory is served; raises ConfigError if it cannot be."""
        ...

    def reach(self, export: NativeExport, here: str, config: TransferConfig) -> Way:
        """Return how that source is read from the host `here`; raises TransferFailed if it cannot be."""
        ...


class NativeTransport(LaneTransport):
    """See the module."""

    def __init__(
        self,
        plan: NativePlan,
        settings: TransportSettings,
        guard: SourceGuard | None,
        clock: Clock,
        on_event: Callable[[], None],
    ) -> None:
        super().__init__(plan.capabilities, settings, guard, clock, on_event)
        self._plan = plan
        self._clock = clock
        self._landings: dict[Way, Revival[Landing]] = {}
        self._server: Revival[NativeEngine] | None = None
        self._served = Way("", sidecar=True)
        self._ways: Counter[str] = Counter()

    def statistics(self) -> dict[str, float]:
        """See `SupportsStatistics`."""
        revivals = [*self._landings.values(), *((self._server,) if self._server is not None else ())]
        return {
            "engine_restarts": float(sum(revival.num_restarts for revival in revivals)),
            "worse_ways": float(self._ways["worse"]),
            "peers_direct": float(self._ways["cma"] + self._ways["rdma"]),
            "peers_tcp": float(self._ways["tcp"]),
        }

    def destroy(self) -> None:
        self._stop_serving()
        # The engines first: that is the fence, and it ends every wait of the lanes.
        for landings in list(self._landings.values()):
            landings.close()
        super().destroy()

    def _serve(self, guard: SourceGuard) -> bytes:
        del guard  # readers come without asking; validate-on-release decides
        regions = tuple(self._shared.regions.regions.values())
        if self._server is None:
            self._served = self._plan.serve(regions, self._shared.config)
            self._server = Revival(f"the serving engine of {self.capabilities.name}", self._open_server, self._clock)
            self._server.get()
        export = NativeExport(
            host=host_id(),
            lane=self._served.lane,
            engine=self._server.living().export(),
            regions=tuple((region.id, region.nbytes) for region in regions),
        )
        return msgspec.msgpack.encode(export)

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()

    def _open_peer(self, info: PeerInfo, timeout_s: float) -> LanePeer:
        try:
            export = msgspec.msgpack.decode(info.blob, type=NativeExport)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TransferFailed(f"the peer's {info.transport} description cannot be read: {error}") from error
        if not export.regions:
            raise TransferFailed("the peer serves no memory")
        way = self._plan.reach(export, host_id(), self._shared.config)
        peer, seconds = self._connected(info, export, way, timeout_s)
        if way.in_steps and not peer.moves_at_once(timeout_s):
            # Then only the ring bounds how long pages wait for a proof.
            peer.disconnect()
            way = replace(way, direct=False, in_steps=False, worse="the library does not read that memory directly")
            peer, seconds = self._connected(info, export, way, timeout_s)
        self._ways[way.lane] += 1
        self._ways["worse"] += bool(way.worse)
        logger.log(
            logging.WARNING if way.worse else logging.INFO,
            "%s reads from %s by %s%s%s (first read %.1f ms)%s",
            info.transport,
            info.incarnation[:8],
            way.lane,
            " in a sidecar" if way.sidecar else "",
            ", straight into the pages" if way.direct else "",
            seconds * 1e3,
            f": {way.worse}" if way.worse else "",
        )
        return peer

    def _connected(self, info: PeerInfo, export: NativeExport, way: Way, timeout_s: float) -> tuple[NativePeer, float]:
        """Return a peer that has been read from once by this way, and how long that took; raises TransferFailed."""
        landings = self._landings.get(way)
        if landings is None:
            name = f"the {way.lane} engine of {info.transport}"
            landings = self._landings[way] = Revival(name, lambda _: self._open_landing(way), self._clock)
        if way.direct:
            config, most = self._shared.config, self.capabilities.max_bytes_per_op
            piece_bytes = min(config.step_bytes, most) if way.in_steps else most
            peer: NativePeer = DirectPeer(info, self._shared, export, landings, piece_bytes)
        else:
            peer = StagedPeer(info, self._shared, export, landings)
        try:
            seconds = peer.probe(timeout_s)
        except BaseException:
            peer.disconnect()
            raise
        return peer, seconds

    def _open_server(self, generation: int) -> NativeEngine:
        regions = tuple(self._shared.regions.regions.values())
        if generation > 1:
            logger.warning("the serving engine of %s is opened again", self.capabilities.name)
        return self._open(self._served, regions, serves=True, on_death=self._server_died)

    def _server_died(self) -> None:
        """Open it again without being asked: peers get the new description with their next handshake."""
        if self._server is not None:
            threading.Thread(target=self._server.revive, name="kv-revive", daemon=True).start()

    def _open_landing(self, way: Way) -> Landing:
        config = self._shared.config

        def open_one(ring: MemoryRegion) -> NativeEngine:
            regions = tuple(self._shared.regions.regions.values()) if way.direct else ()
            return self._open(way, (ring, *regions), serves=False, on_death=lambda: None)

        return Landing(
            open_one,
            ring_bytes=4 * PROBE_BYTES if way.direct else config.landing_ring_bytes,
            slot_bytes=PROBE_BYTES if way.direct else config.landing_slot_bytes,
            directory=config.segment_directory if way.sidecar else "",
        )

    def _open(
        self, way: Way, regions: Sequence[MemoryRegion], *, serves: bool, on_death: Callable[[], None]
    ) -> NativeEngine:
        settings = self._shared.settings
        spec = EngineSpec(
            module=self._plan.module,
            name=f"{settings.incarnation}-{fresh_incarnation()}",
            host=settings.config.host,
            serves=serves,
            options=way.options,
        )
        if way.sidecar:
            return Sidecar(spec, regions, settings.config.segment_directory, on_death)
        return open_engine(spec, regions)


def needs_shared(regions: Sequence[MemoryRegion], name: str) -> None:
    """Raise ConfigError unless a sidecar can map all regions."""
    private = [region.id for region in regions if not region.shared_name]
    if private:
        raise ConfigError(f"KV region {private[0]} is not in shared memory, so the {name} transport cannot serve it")


def host_id() -> str:
    """Return what two processes share that may read each other's memory: boot and process namespace."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {_PID_NAMESPACE.readlink()}"
    except OSError as error:
        raise ConfigError(f"the host has no boot id, so hosts cannot be told apart: {error.strerror}") from error
