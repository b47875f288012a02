"""Reads within one process: for tests, for a worker that is its own peer, and as the double that other tests slow down.

Behaves like a remote transport: its own thread moves the bytes, the source's guard is asked before every step.
"""

from collections.abc import Callable, Mapping

from core.clock import Clock
from core.errors import ConfigError, LeaseLost, TransferFailed
from kv_transfer.api import Capabilities, PeerInfo, Records, SourceGuard
from kv_transfer.backends.copying import copy_in_steps
from kv_transfer.backends.lane import Job
from kv_transfer.backends.lane_transport import LanePeer, LaneTransport, Shared
from kv_transfer.exchange import Exchange, Offer
from kv_transfer.settings import TransportSettings

CAPABILITIES = Capabilities(
    name="loopback",
    version="1",
    max_records_per_op=4096,
    max_bytes_per_op=1 << 30,
    max_ops_in_flight_per_peer=64,
    same_host_only=True,
    read_is_safe_for_source=True,
    cancel_is_fence=True,
    landing="direct",
)


class LoopbackPeer(LanePeer):
    """A source in this process."""

    def __init__(self, info: PeerInfo, shared: Shared, exchange: Exchange) -> None:
        self._exchange = exchange
        super().__init__(info, shared)

    def source_sizes(self) -> Mapping[int, int]:
        return {region: len(view) for region, view in self._offer().views.items()}

    def read(self, job: Job) -> None:
        offer = self._offer()
        records, pace = job.records, self._exchange.pace

        def before_step(part: Records) -> None:
            if pace is not None:
                pace(job.op, job.op.landed_bytes)
            job.check(self.shared.clock)
            if not offer.guard.readable(job.lease, part.source_region, part.source_offsets, part.nbytes):
                raise LeaseLost("the source refused the read: the lease is over or does not cover it")

        copy_in_steps(
            job,
            offer.views[records.source_region],
            self.shared.regions.views[records.target_region],
            self.shared.config.step_bytes,
            before_step,
        )

    def _offer(self) -> Offer:
        offer = self._exchange.find(self.info.incarnation)
        if offer is None:
            raise TransferFailed("the source has left this process")
        return offer


class LoopbackTransport(LaneTransport):
    """See the module."""

    def __init__(
        self, settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
    ) -> None:
        if settings.exchange is None:
            raise ConfigError("the loopback transport works only within one process, with a shared exchange")
        super().__init__(CAPABILITIES, settings, guard, clock, on_event)
        self._exchange = settings.exchange
        self._serving = False

    def _serve(self, guard: SourceGuard) -> bytes:
        self._exchange.publish(self._shared.settings.incarnation, Offer(dict(self._shared.regions.views), guard))
        self._serving = True
        return b""

    def _stop_serving(self) -> None:
        if self._serving:
            self._exchange.withdraw(self._shared.settings.incarnation)
            self._serving = False

    def _open_peer(self, info: PeerInfo, timeout_s: float) -> LoopbackPeer:  # noqa: ARG002 - nothing here can wait
        if self._exchange.find(info.incarnation) is None:
            raise TransferFailed("the source is not in this process")
        return LoopbackPeer(info, self._shared, self._exchange)


def open_transport(
    settings: TransportSettings, guard: SourceGuard | None, clock: Clock, on_event: Callable[[], None]
) -> LoopbackTransport:
    """Open the loopback transport."""
    return LoopbackTransport(settings, guard, clock, on_event)
