"""How many samples run at once: exact permits, a bounded queue by priority, refusals that say when to come back.

Asyncio, one loop; times from an injected clock. Knows no workers and no HTTP.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from core.clock import Clock
from core.errors import DeadlineExceeded, Draining, NoCapacity

RATE_SAMPLES = 64
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `limits`: per gateway process."""

    max_in_flight: Annotated[int, Meta(ge=1)] = 1024
    """Samples sent to workers and not ended."""
    max_queued: Annotated[int, Meta(ge=0)] = 1024
    queue_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """Longest wait for a permit; the request's own deadline may be shorter."""


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class Admission:
    """Grants permits: lower priority first, first come first served within one."""

    def __init__(self, clock: Clock, limits: Limits) -> None:
        self._clock = clock
        self._limits = limits
        self._waiters: list[_Waiter] = []
        self._queued = 0
        self._number = 0
        self._in_flight = 0
        self._releases: deque[float] = deque(maxlen=RATE_SAMPLES)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Permits held."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Requests that wait for one."""
        return self._queued

    @asynccontextmanager
    async def permit(self, *, priority: int, timeout_s: float) -> AsyncGenerator[None]:
        """Hold one permit for the body.

        Raises `NoCapacity` if the queue is full or slow, `DeadlineExceeded` if `timeout_s` passes first, `Draining`.
        """
        await self._acquire(priority, timeout_s)
        try:
            yield
        finally:
            self._release()

    def retry_after_s(self) -> float:
        """Predict when a new request would get a permit: the queue over the recent rate of endings."""
        if len(self._releases) < 2:
            return SHORTEST_RETRY_S
        span = max(1e-3, self._clock.now() - self._releases[0])
        seconds = (self._queued + 1) * span / len(self._releases)
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, seconds))

    def drain(self) -> None:
        """Refuse new requests from now on; those queued still run."""
        self._draining = True

    async def idle(self) -> None:
        """Wait until no permit is held or waited for."""
        await self._idle.wait()

    async def _acquire(self, priority: int, timeout_s: float) -> None:
        if self._draining:
            raise Draining("this gateway is going away; ask another", retry_after_s=SHORTEST_RETRY_S)
        if self._in_flight < self._limits.max_in_flight:
            self._in_flight += 1
            self._idle.clear()
            return
        if self._queued >= self._limits.max_queued:
            raise NoCapacity(
                f"{self._in_flight} requests run and {self._queued} wait; the queue is full",
                retry_after_s=self.retry_after_s(),
            )
        await self._wait(priority, timeout_s)

    async def _wait(self, priority: int, timeout_s: float) -> None:
        self._number += 1
        waiter = _Waiter(priority, self._number, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        self._queued += 1
        patience = min(timeout_s, self._limits.queue_timeout_s)
        try:
            async with asyncio.timeout(patience):
                await waiter.granted
        except BaseException as error:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self._release()  # granted in the same turn of the loop in which we gave up
            else:
                self._queued -= 1
                waiter.granted.cancel()
                self._forget_cancelled()
            if not isinstance(error, TimeoutError):
                raise
            if patience >= timeout_s:
                raise DeadlineExceeded("the request's deadline passed while it waited for admission") from error
            raise NoCapacity(
                f"no permit within {patience:g} s; {self._queued} requests wait", retry_after_s=self.retry_after_s()
            ) from error

    def _release(self) -> None:
        self._releases.append(self._clock.now())
        while self._waiters:
            waiter = heapq.heappop(self._waiters)
            if not waiter.granted.done():
                self._queued -= 1
                waiter.granted.set_result(None)
                return  # the permit changes hands
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    def _forget_cancelled(self) -> None:
        """Keep the heap proportional to the queue when clients come and go."""
        if len(self._waiters) > 2 * self._queued + RATE_SAMPLES:
            self._waiters = [waiter for waiter in self._waiters if not waiter.granted.done()]
            heapq.heapify(self._waiters)
