"""A source that is read through a native engine, on its lane's thread: through the landing ring, or straight to the regions."""

import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Flying:
    """A read into a slot of the ring."""

    landing: Landing
    ticket: int
    slot: int
    piece: Records


class StagedPeer(NativePeer):
    """Reads land in the ring and are copied to the regions here: when `read` is over, no page is written any more.

    The first piece of the job that follows is asked for while the last of this one is copied; it can only dirty a slot.
    """

    def __init__(self, info: PeerInfo, shared: Shared, export: NativeExport, landings: Revival[Landing]) -> None:
        self._early: tuple[Job, _Flying] | None = None
        super().__init__(info, shared, export, landings)

    def disconnect(self) -> None:
        self.lane.stop()
        self._forget_early()
        super().disconnect()

    def read(self, job: Job) -> None:
        job.check(self.shared.clock)
        landing, handle = self.bind(self.shared.config.connect_timeout_s)
        pieces = self._pieces(job, landing)
        flying: deque[_Flying] = deque()
        if self._early is not None and self._early[0] is job and self._early[1].landing is landing:
            flying.append(self._early[1])
            pieces.popleft()
            self._early = None
        self._forget_early()
        try:
            while pieces or flying:
                while pieces and len(flying) < _AHEAD:
                    begun = self._begin(landing, handle, pieces[0], 0.0 if flying else _LOOK_S)
                    if begun is None:
                        break
                    flying.append(begun)
                    pieces.popleft()
                if flying:
                    self._land(job, landing, handle, flying, last=not pieces and len(flying) < _AHEAD)
                else:
                    job.check(self.shared.clock)
                    self.bind(self.shared.config.connect_timeout_s)  # a ring without proof is replaced here
                    if landing.broken:
                        raise TransferFailed("the landing ring was replaced")
        finally:
            for each in flying:
                landing.retire(each.ticket, each.slot)

    def _pieces(self, job: Job, landing: Landing) -> deque[Records]:
        return deque(split(job.records, self.shared.capabilities.max_records_per_op, landing.slot_bytes))

    def _begin(self, landing: Landing, handle: int, piece: Records, timeout_s: float) -> _Flying | None:
        slot = landing.acquire(timeout_s)
        return None if slot is None else _Flying(landing, self._post(landing, handle, slot, piece), slot, piece)

    def _begin_following(self, landing: Landing, handle: int) -> None:
        job = None if self._early is not None else self.lane.following
        if job is None or not len(job.records.nbytes):
            return
        with contextlib.suppress(TandemError):  # it is told when its turn has come
            begun = self._begin(landing, handle, self._pieces(job, landing)[0], 0.0)
            self._early = None if begun is None else (job, begun)

    def _forget_early(self) -> None:
        if self._early is not None:
            _, begun = self._early
            begun.landing.retire(begun.ticket, begun.slot)
            self._early = None

    def _land(self, job: Job, landing: Landing, handle: int, flying: deque[_Flying], *, last: bool) -> None:
        """Wait for the oldest read and copy it out. `last`: nothing of the job is left to ask for."""
        ticket, slot, piece = flying[0].ticket, flying[0].slot, flying[0].piece
        patience_s, start = self.shared.config.progress_timeout_s, self.shared.clock.now()
        if last:
            self._begin_following(landing, handle)
        while (outcome := landing.engine.wait(ticket, _LOOK_S)) is None:
            if last:
                self._begin_following(landing, handle)
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
