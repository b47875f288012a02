"""What the embedded transports share: regions, the book of operations, and one lane per connected source.

A backend adds how a source is exported and connected, and how one read moves its bytes.
"""

import abc
from collections.abc import Callable, Mapping

from core.clock import Clock
from core.errors import ConfigError
from core.ids import LeaseId, TransferId
from kv_transfer.api import Capabilities, MemoryRegion, Op, Peer, PeerInfo, Records, SourceGuard
from kv_transfer.backends.lane import Job, Lane
from kv_transfer.backends.ledger import OpLedger
from kv_transfer.backends.regions import RegionTable
from kv_transfer.config import TransferConfig
from kv_transfer.settings import TransportSettings


class LanePeer(abc.ABC):
    """A connected source whose reads run one after the other."""

    def __init__(self, info: PeerInfo, shared: "Shared") -> None:
        self.info = info
        self.shared = shared
        self.lane = Lane(
            f"kv-{info.transport}", shared.ledger, self.read, shared.capabilities.max_ops_in_flight_per_peer
        )

    @abc.abstractmethod
    def source_sizes(self) -> Mapping[int, int]:
        """Return the source's regions and their sizes in bytes; raises TransferFailed if it is gone."""

    @abc.abstractmethod
    def read(self, job: Job) -> None:
        """Move the bytes of one job on the lane's thread; on return or raise none of them moves any more."""

    def disconnect(self) -> None:
        """See `Peer.disconnect`."""
        self.lane.stop()


class Shared:
    """What a transport and its peers both use."""

    def __init__(
        self, capabilities: Capabilities, settings: TransportSettings, clock: Clock, on_event: Callable[[], None]
    ) -> None:
        self.capabilities = capabilities
        self.settings = settings
        self.config: TransferConfig = settings.config
        self.clock = clock
        self.regions = RegionTable(settings.cuda)
        self.ledger = OpLedger(clock, on_event)


class LaneTransport(abc.ABC):
    """Base of the embedded transports; see `kv_transfer.api.Transport` for the contract."""

    def __init__(
        self,
        capabilities: Capabilities,
        settings: TransportSettings,
        guard: SourceGuard | None,
        clock: Clock,
        on_event: Callable[[], None],
    ) -> None:
        self.capabilities = capabilities
        self._shared = Shared(capabilities, settings, clock, on_event)
        self._guard = guard
        self._peers: list[LanePeer] = []

    def register(self, region: MemoryRegion) -> None:
        self._shared.regions.add(region)

    def export(self) -> PeerInfo:
        if self._guard is None:
            raise ConfigError("a transport without a guard serves nobody")
        blob = self._serve(self._guard)
        return PeerInfo(transport=self.capabilities.name, incarnation=self._shared.settings.incarnation, blob=blob)

    def connect(self, info: PeerInfo, timeout_s: float) -> Peer:
        self._peers = [peer for peer in self._peers if not peer.lane.stopped]
        peer = self._open_peer(info, timeout_s)
        self._peers.append(peer)
        return peer

    def submit(self, peer: Peer, records: Records, transfer: TransferId, lease: LeaseId, deadline: float) -> Op:
        assert isinstance(peer, LanePeer)
        assert peer.shared is self._shared, "the peer belongs to another transport"
        self._shared.regions.check(records, peer.source_sizes())
        return peer.lane.submit(
            lambda: Job(self._shared.ledger.open(transfer, records.total_bytes), records, lease, deadline)
        )

    def cancel(self, op: Op) -> None:
        for peer in list(self._peers):
            peer.lane.cancel(op)

    def poll(self) -> list[Op]:
        return self._shared.ledger.poll()

    def quiesced(self, op: Op) -> bool:
        return self._shared.ledger.quiesced(op)

    def destroy(self) -> None:
        self._stop_serving()
        for peer in list(self._peers):
            peer.disconnect()
        self._shared.ledger.destroy()

    @abc.abstractmethod
    def _serve(self, guard: SourceGuard) -> bytes:
        """Start serving our regions and return the blob that a peer connects with; idempotent."""

    @abc.abstractmethod
    def _stop_serving(self) -> None:
        """Serve no more; idempotent."""

    @abc.abstractmethod
    def _open_peer(self, info: PeerInfo, timeout_s: float) -> LanePeer:
        """Connect; raises TransferFailed and leaves nothing behind."""
