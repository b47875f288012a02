"""The source's promises: which pages and rows stay readable for whom, until when, on the source's own clock.

Thread-safe: the event loop grants and ends, the serving threads of transports ask. Knows no engine: whoever ends a
lease unpins the pages.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from core.clock import Clock
from core.errors import NoCapacity
from core.ids import Incarnation, LeaseId, TransferId
from core.kv import Component, ComponentKind, KVLayout
from kv_transfer.api import I64


def _none() -> I64:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Lease:
    """One promise. Owned by its table; a copy of the fields is what callers may keep."""

    id: LeaseId
    peer: Incarnation
    transfer: TransferId
    expires_at: float
    renewed: bool = False
    """False: nobody has asked for it since it was granted."""
    pages: I64 = field(default_factory=_none)
    """Sorted, distinct; replaced as a whole, so a reader may keep the array without the lock."""
    rows: I64 = field(default_factory=_none)


class LeaseTable:
    """All leases of one source. Expiry is decided at every question, never only by the reaper."""

    def __init__(self, *, layout: KVLayout, clock: Clock, max_per_peer: int, orphan_ttl_s: float) -> None:
        self._clock = clock
        self._max_per_peer = max_per_peer
        self._orphan_ttl_s = orphan_ttl_s
        self._lock = threading.Lock()
        self._leases: dict[LeaseId, Lease] = {}
        self._per_peer: dict[Incarnation, int] = {}
        self._last_id = 0
        self._components: dict[int, list[Component]] = {}
        for component in layout.components:
            self._components.setdefault(component.region, []).append(component)

    def grant(self, peer: Incarnation, transfer: TransferId, ttl_s: float) -> tuple[LeaseId, float]:
        """Return a new lease and its first life in seconds (short until the first renewal); raises `NoCapacity`."""
        life = min(ttl_s, self._orphan_ttl_s)
        with self._lock:
            held = self._per_peer.get(peer, 0)
            if held >= self._max_per_peer:
                raise NoCapacity(f"peer {peer[:8]} holds {held} leases already", retry_after_s=1.0)
            self._per_peer[peer] = held + 1
            self._last_id += 1
            lease = Lease(LeaseId(self._last_id), peer, transfer, self._clock.now() + life)
            self._leases[lease.id] = lease
        return lease.id, life

    def extend(self, lease: LeaseId, pages: Sequence[int]) -> bool:
        """Cover more pages; False if the lease is over."""
        return self._cover(lease, np.asarray(pages, np.int64), _none())

    def cover_row(self, lease: LeaseId, row: int) -> bool:
        """Cover the ring and state records of a row; False if the lease is over."""
        return self._cover(lease, _none(), np.array([row], np.int64))

    def renew(self, lease: LeaseId, ttl_s: float) -> bool:
        """Expiry becomes max(expiry, now + ttl); False if the lease is over: it never comes back."""
        with self._lock:
            found = self._living(lease)
            if found is None:
                return False
            found.expires_at = max(found.expires_at, self._clock.now() + ttl_s)
            found.renewed = True
            return True

    def alive(self, lease: LeaseId) -> bool:
        """True iff the lease was granted, not ended, and has never lapsed."""
        with self._lock:
            return self._living(lease) is not None

    def end(self, lease: LeaseId) -> bool:
        """End a lease; True iff it lived up to this moment."""
        with self._lock:
            alive = self._living(lease) is not None
            self._forget(lease)
            return alive

    def expired(self) -> list[Lease]:
        """Remove and return every lapsed lease; looks at all of them, whatever their order."""
        with self._lock:
            now = self._clock.now()
            lapsed = [lease for lease in self._leases.values() if now >= lease.expires_at]
            for lease in lapsed:
                self._forget(lease.id)
        return lapsed

    def readable(self, lease: LeaseId, region: int, offsets: I64, nbytes: I64) -> bool:
        with self._lock:
            found = self._living(lease)
            if found is None:
                return False
            pages, rows = found.pages, found.rows
        todo = np.ones(len(offsets), bool)
        for component in self._components.get(region, []):
            records = pages if component.kind is ComponentKind.PAGED else rows
            covered = _covered(component, records, offsets, nbytes)
            if covered.all():
                return True
            todo &= ~covered
        return not todo.any()

    def __len__(self) -> int:
        with self._lock:
            return len(self._leases)

    @property
    def num_pages(self) -> int:
        """Pages covered, counted once per lease."""
        with self._lock:
            return sum(len(lease.pages) for lease in self._leases.values())

    def _cover(self, lease: LeaseId, pages: I64, rows: I64) -> bool:
        with self._lock:
            found = self._living(lease)
            if found is None:
                return False
            found.pages = np.union1d(found.pages, pages)
            found.rows = np.union1d(found.rows, rows)
            return True

    def _living(self, lease: LeaseId) -> Lease | None:
        found = self._leases.get(lease)
        return found if found is not None and self._clock.now() < found.expires_at else None

    def _forget(self, lease: LeaseId) -> None:
        found = self._leases.pop(lease, None)
        if found is not None:
            left = self._per_peer[found.peer] - 1
            if left:
                self._per_peer[found.peer] = left
            else:
                del self._per_peer[found.peer]


def _covered(
    component: Component, records: I64, offsets: I64, nbytes: I64
) -> np.ndarray[tuple[int], np.dtype[np.bool]]:
    """Which byte ranges lie wholly inside leased records of a component (a run may span gapless neighbours)."""
    if not len(records):
        return np.zeros(len(offsets), bool)
    stride = component.stride_bytes
    begins = offsets - component.offset
    # A range of more bytes than there are is cut, so that no sum wraps around, and lies outside even so.
    sizes = np.minimum(nbytes, component.num_records * stride + 1)
    first = begins // stride
    last = (begins + sizes - 1) // stride
    # Records are sorted and distinct: a range is leased iff as many leased records lie in it as it has records.
    leased = np.searchsorted(records, last, side="right") - np.searchsorted(records, first, side="left")
    good = (leased == last - first + 1) & (nbytes > 0) & (last < component.num_records)
    if stride != component.record_bytes:
        good &= begins - first * stride + sizes <= component.record_bytes
    return good
