"""Everything that is counted and must be given back, as leases with an owner and an age.

A lease is taken at one place and given back at one place, once; a count is the number of leases, so it cannot drift.
Event loop's thread only.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from core.clock import Clock

KINDS = ("request", "queued", "permit", "attempt")
"""HTTP requests, waits for admission, permits, attempts at workers."""


@dataclass(slots=True, eq=False)
class Lease:
    """One thing that somebody holds."""

    kind: str
    owner: str
    since: float


class Leases:
    """All that are out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._out: dict[Lease, None] = {}

    def take(self, kind: str, owner: str) -> Lease:
        """Count one."""
        lease = Lease(kind, owner, self._clock.now())
        self._out[lease] = None
        return lease

    def give_back(self, lease: Lease) -> None:
        """Count it no more; a second time is our bug."""
        del self._out[lease]

    @contextmanager
    def hold(self, kind: str, owner: str) -> Generator[Lease]:
        """Hold one for the body."""
        lease = self.take(kind, owner)
        try:
            yield lease
        finally:
            self.give_back(lease)

    def counts(self) -> dict[str, int]:
        """Return how many are out, by kind."""
        found = Counter(lease.kind for lease in self._out)
        return {kind: found[kind] for kind in KINDS}

    def snapshot(self, limit: int = 1000) -> list[dict[str, str | float]]:
        """Return the oldest that are out, with their ages in seconds."""
        now = self._clock.now()
        oldest = sorted(self._out, key=lambda lease: lease.since)[:limit]
        return [{"kind": each.kind, "owner": each.owner, "age_s": round(now - each.since, 3)} for each in oldest]
