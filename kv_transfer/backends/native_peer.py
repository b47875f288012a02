"""A source that is read through a native engine, on its lane's thread: through the landing ring, or straight to the regions."""

import threading
from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np

from core.errors import TandemError, TransferFailed
from kv_transfer.api import PeerInfo, Records
from kv_transfer.backends.landing import Landing
from kv_transfer.backends.lane import Job
from kv_transfer.backends.lane_transport import LanePeer, Shared
from kv_transfer.backends.native import Outcome
from kv_transfer.backends.revival import Revival
from kv_transfer.plan import split

PROBE_BYTES = 4096
_AHEAD = 2
"""Slots of one read in flight: one lands while the one before is copied out."""
_LOOK_S = 0.02
"""A read that waits looks for cancellation this often."""


class NativeExport(msgspec.Struct, frozen=True, kw_only=True):
    """The blob of a native transport."""

    host: str
    """Boot id and process namespace of the source: equal on both sides means that memory may be read directly."""
    lane: str
    """How the source serves: ``rdma`` from its own process, anything else from a sidecar."""
    engine: bytes
    regions: tuple[tuple[int, int], ...]
    """(region id, bytes)."""


class NativePeer(LanePeer):
    """What both ways share: the connection, made anew when the engine was."""

    def __init__(self, info: PeerInfo, shared: Shared, export: NativeExport, landings: Revival[Landing]) -> None:
        self._export = export
        self._sizes = dict(export.regions)
        self._landings = landings
        self._binding = threading.Lock()
        self._bound: tuple[Landing, int] | None = None
        super().__init__(info, shared)

    def source_sizes(self) -> Mapping[int, int]:
        return self._sizes

    def probe(self, timeout_s: float) -> float:
        """Read a few bytes and return how long it took; raises TransferFailed."""
        return self._read_few(timeout_s, timeout_s)

    def moves_at_once(self, timeout_s: float) -> bool:
        """True if a read is over when it has been posted. Asked after a first read, which connects."""
        try:
            self._read_few(timeout_s, 0.0)
        except TransferFailed:
            return False
        return True

    def _read_few(self, timeout_s: float, patience_s: float) -> float:
        start = self.shared.clock.now()
        landing, handle = self.bind(timeout_s)
        slot = landing.acquire(timeout_s)
        if slot is None:
            raise TransferFailed("the landing ring is full")
        region, nbytes = next(iter(self._sizes.items()))
        one = np.array([min(nbytes, PROBE_BYTES)], np.int64)
        ticket = self._post(
            landing, handle, slot, Records(region, 0, np.zeros(1, np.int64), np.zeros(1, np.int64), one)
        )
        outcome = landing.engine.wait(ticket, patience_s)
        if outcome is None:
            landing.retire(ticket, slot)
            raise TransferFailed(f"no byte came within {patience_s:g} s")
        landing.settle(slot, proven=outcome.proven)
        _check(outcome)
        return self.shared.clock.now() - start

    def disconnect(self) -> None:
        super().disconnect()
        with self._binding:
            if self._bound is not None:
                landing, handle = self._bound
                landing.engine.disconnect(handle)
                self._bound = None

    def bind(self, timeout_s: float) -> tuple[Landing, int]:
        """Return the living engine and our handle there; raises TransferFailed or ConfigError."""
        with self._binding:
            landing = self._landings.get()
            if self._bound is None or self._bound[0] is not landing:
                self._bound = landing, landing.engine.connect(self._export.engine, timeout_s)
            return self._bound

    def _post(self, landing: Landing, handle: int, slot: int, records: Records) -> int:
        try:
            return landing.engine.post(handle, landing.place(slot, records))
        except TandemError:
            landing.settle(slot)  # nothing was posted
            raise


class StagedPeer(NativePeer):
    """Reads land in the ring and are copied to the regions here: when `read` is over, no page is written any more."""

    def read(self, job: Job) -> None:
        job.check(self.shared.clock)
        landing, handle = self.bind(self.shared.config.connect_timeout_s)
        pieces = deque(split(job.records, self.shared.capabilities.max_records_per_op, landing.slot_bytes))
        flying: deque[tuple[int, int, Records]] = deque()
        try:
            while pieces or flying:
                while pieces and len(flying) < _AHEAD:
                    slot = landing.acquire(0.0 if flying else _LOOK_S)
                    if slot is None:
                        break
                    flying.append((self._post(landing, handle, slot, pieces[0]), slot, pieces.popleft()))
                if flying:
                    self._land(job, landing, flying)
                else:
                    job.check(self.shared.clock)
                    self.bind(self.shared.config.connect_timeout_s)  # a ring without proof is replaced here
                    if landing.broken:
                        raise TransferFailed("the landing ring was replaced")
        finally:
            for ticket, slot, _ in flying:
                landing.retire(ticket, slot)

    def _land(self, job: Job, landing: Landing, flying: deque[tuple[int, int, Records]]) -> None:
        """Wait for the oldest read and copy it out."""
        ticket, slot, piece = flying[0]
        patience_s, start = self.shared.config.progress_timeout_s, self.shared.clock.now()
        while (outcome := landing.engine.wait(ticket, _LOOK_S)) is None:
            job.check(self.shared.clock)
            if self.shared.clock.now() - start >= patience_s:
                raise TransferFailed(f"no byte came for {patience_s:g} s")
        flying.popleft()
        try:
            _check(outcome)
            job.check(self.shared.clock)
            landing.copy_out(slot, piece, self.shared.regions.views[piece.target_region])
            job.op.landed_bytes += piece.total_bytes
        finally:
            landing.settle(slot, proven=outcome.proven)


class DirectPeer(NativePeer):
    """Reads land in the regions: a cancelled one stays unproven until the library says that it is over, or the fence."""

    def __init__(
        self,
        info: PeerInfo,
        shared: Shared,
        export: NativeExport,
        landings: Revival[Landing],
        piece_bytes: int,
    ) -> None:
        self._piece_bytes = piece_bytes
        super().__init__(info, shared, export, landings)

    def read(self, job: Job) -> None:
        job.check(self.shared.clock)
        landing, handle = self.bind(self.shared.config.connect_timeout_s)
        for piece in split(job.records, self.shared.capabilities.max_records_per_op, self._piece_bytes):
            job.check(self.shared.clock)
            ticket = landing.engine.post(handle, piece)
            while (outcome := landing.engine.wait(ticket, _LOOK_S)) is None:
                try:
                    job.check(self.shared.clock)
                except TandemError as error:
                    self.shared.ledger.doubt(job.op, error)
            if not outcome.proven:
                self.shared.ledger.doubt(job.op, TransferFailed(outcome.error or "the library gave no proof"))
                self._landings.fence(landing)
                raise TransferFailed(outcome.error or "the library gave no proof")
            _check(outcome)
            job.op.landed_bytes += piece.total_bytes
        job.check(self.shared.clock)


def _check(outcome: Outcome) -> None:
    if outcome.error:
        raise TransferFailed(outcome.error)
