"""Who is next: start-time fair queueing over tenants, arrival with a head start by priority within one.

Pure state; knows no clock and no permits.
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True, eq=False)
class Waiter:
    """One who waits."""

    key: float
    """Arrival + priority x aging: the smallest of a tenant goes first."""
    tenant: str
    cost: float
    """Divided by the tenant's weight."""
    granted: asyncio.Future[None]


@dataclass(slots=True)
class _Line:
    start: float
    """Virtual time at which its next one is due."""
    heap: list[tuple[float, int, Waiter]] = field(default_factory=list[tuple[float, int, Waiter]])


class FairQueue:
    """All who wait. Operations cost the logarithm of a tenant's line, plus the number of tenants."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._numbers = count()
        self._virtual = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def charge(self, tenant: str, cost: float) -> None:
        """Count one who did not have to wait."""
        line = self._line(tenant)
        self._virtual = max(self._virtual, line.start)
        line.start += cost
        self._forget()

    def push(self, waiter: Waiter) -> None:
        """Let one wait."""
        heapq.heappush(self._line(waiter.tenant).heap, (waiter.key, next(self._numbers), waiter))
        self._length += 1

    def pop(self, may_run: Callable[[str], bool]) -> Waiter | None:
        """Take out who is next among the tenants that may run, and charge it."""
        if not self._length:
            return None
        self._strip()
        ready = [(line.start, tenant) for tenant, line in self._lines.items() if line.heap and may_run(tenant)]
        if not ready:
            return None
        line = self._lines[min(ready)[1]]
        waiter = heapq.heappop(line.heap)[2]
        self._length -= 1
        self._virtual = max(self._virtual, line.start)
        line.start += waiter.cost
        self._forget()
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Take out one who gave up; nothing if it is not there."""
        line = self._lines.get(waiter.tenant)
        kept = [entry for entry in line.heap if entry[2] is not waiter] if line is not None else []
        if line is not None and len(kept) < len(line.heap):
            heapq.heapify(kept)
            line.heap = kept
            self._length -= 1

    def most_crowding(self, tenant: str) -> Waiter | None:
        """Return the last of the longest line if `tenant`'s own, with one more, stays shorter than it; else None."""
        self._strip()
        longest = max(self._lines.values(), key=lambda line: len(line.heap), default=None)
        own = len(self._lines[tenant].heap) if tenant in self._lines else 0
        if longest is None or len(longest.heap) <= own + 1:
            return None
        return max((entry for entry in longest.heap if not entry[2].granted.done()), default=longest.heap[0])[2]

    def _strip(self) -> None:
        """Take out those at the front who gave up in this turn of the loop and have not said so yet."""
        for line in self._lines.values():
            while line.heap and line.heap[0][2].granted.done():
                heapq.heappop(line.heap)
                self._length -= 1

    def _line(self, tenant: str) -> _Line:
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._virtual)
        elif not line.heap:
            # Whoever rested has saved nothing up.
            line.start = max(line.start, self._virtual)
        return line

    def _forget(self) -> None:
        """Drop the lines of those who rest and owe nothing."""
        for tenant in [t for t, line in self._lines.items() if not line.heap and line.start <= self._virtual]:
            del self._lines[tenant]
