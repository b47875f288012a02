"""How many samples run at once: exact permits, one bounded queue that is fair to tenants, refusals that say when to
come back.

Permits go to tenants by start-time fair queueing (Goyal, Vin, Cheng 1996): each tenant's waiters are charged
cost / weight in virtual time, and the tenant with the smallest start is served, so that over any busy stretch tenants
get permits in proportion to their weights, whoever asks more. Within a tenant lower priority values go first, but a
waiter is overtaken only by those who come within `aging_s` per step of priority. Asyncio, one loop; times from an
injected clock. Knows no workers and no HTTP.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Annotated

import msgspec
from msgspec import Meta

from core.clock import Clock
from core.errors import DeadlineExceeded, Draining, NoCapacity
from gateway.fair_queue import FairQueue, Waiter
from gateway.leases import Lease, Leases
from gateway.tenants import ANYONE, Tenant

RATE_SAMPLES = 64
SURE_SAMPLES = 16
"""Endings from which a waiting time is predicted well enough to refuse by."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `limits`: per gateway process."""

    max_in_flight: Annotated[int, Meta(ge=1)] = 1024
    """Samples sent to workers and not ended."""
    max_queued: Annotated[int, Meta(ge=0)] = 1024
    queue_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """Longest wait for a permit; the request's own deadline may be shorter."""
    aging_s: Annotated[float, Meta(gt=0)] = 5.0
    """Head start that one step of priority is worth."""
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Of each tenant's limits that this process grants: 1 / number of gateway processes of the deployment."""


class Admission:
    """Grants permits. `tenant_of` returns a tenant's weight and limits by name."""

    def __init__(
        self,
        clock: Clock,
        limits: Limits,
        tenant_of: Callable[[str], Tenant] = lambda _: ANYONE,
        leases: Leases | None = None,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._tenant_of = tenant_of
        self._leases = leases or Leases(clock)
        self._queue = FairQueue()
        self._in_flight = 0
        self._held: dict[str, int] = {}
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
        return len(self._queue)

    def permit(
        self, *, priority: int, timeout_s: float, tenant: str = "", cost: float = 1.0, owner: str = ""
    ) -> "Permit":
        """Hold one permit for the body; `cost` is what it is charged, in tokens or any unit that all use.

        Entering raises `NoCapacity` if the queue is full or slow, `DeadlineExceeded` if `timeout_s` passes first,
        `Draining`.
        """
        return Permit(self, tenant, (priority, timeout_s, cost, owner))

    async def acquire(self, tenant: str, priority: int, timeout_s: float, cost: float, owner: str) -> Lease:
        """Wait for a permit; what is returned goes to `release`. Raises as `permit`."""
        if self._take_free(tenant, cost):
            return self._leases.take("permit", owner)
        waiting = self._leases.take("queued", owner)
        try:
            await self._queue_up(tenant, priority, timeout_s, cost)
        finally:
            self._leases.give_back(waiting)
        return self._leases.take("permit", owner)

    def release(self, tenant: str, lease: Lease) -> None:
        """Give a permit back, once."""
        self._leases.give_back(lease)
        self._release(tenant)

    def retry_after_s(self) -> float:
        """Predict when a new request would get a permit: the queue over the recent rate of endings."""
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, self._wait_s()))

    def drain(self) -> None:
        """Refuse new requests from now on; those queued still run."""
        self._draining = True

    async def idle(self) -> None:
        """Wait until no permit is held or waited for."""
        await self._idle.wait()

    def _wait_s(self) -> float:
        if len(self._releases) < 2:
            return 0.0
        span = max(1e-3, self._clock.now() - self._releases[0])
        return (len(self._queue) + 1) * span / len(self._releases)

    def _take_free(self, name: str, cost: float) -> bool:
        """Take a permit if there is one now; raises `Draining`."""
        if self._draining:
            raise Draining("this gateway is going away; ask another", retry_after_s=SHORTEST_RETRY_S)
        if not self._may_run(name) or self._in_flight >= self._limits.max_in_flight:
            return False
        self._queue.charge(name, cost / self._tenant_of(name).weight)
        self._grant(name)
        return True

    async def _queue_up(self, name: str, priority: int, timeout_s: float, cost: float) -> None:
        tenant = self._tenant_of(name)
        patience = min(timeout_s, self._limits.queue_timeout_s)
        predicted_s = self._wait_s()
        if len(self._releases) >= SURE_SAMPLES and predicted_s > 2 * patience and len(self._queue):
            raise NoCapacity(
                f"a permit is expected in {predicted_s:.1f} s, later than this request can wait",
                retry_after_s=self.retry_after_s(),
            )
        key = self._clock.now() + priority * self._limits.aging_s
        waiter = Waiter(key, name, cost / tenant.weight, asyncio.get_running_loop().create_future())
        self._make_room(waiter)
        self._queue.push(waiter)
        await self._wait(waiter, patience, timeout_s)

    def _make_room(self, waiter: Waiter) -> None:
        """Raise `NoCapacity` if the queue is full of those who have a better claim, else put the worst one out."""
        if len(self._queue) < self._limits.max_queued:
            return
        loser = self._queue.most_crowding(waiter.tenant) if self._limits.max_queued else None
        if loser is not None:
            self._queue.remove(loser)
        error = NoCapacity(
            f"{self._in_flight} requests run and {len(self._queue)} wait; the queue is full",
            retry_after_s=self.retry_after_s(),
        )
        if loser is None:
            raise error
        loser.granted.set_exception(error)

    async def _wait(self, waiter: Waiter, patience: float, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(patience):
                await waiter.granted
        except BaseException as error:
            if not waiter.granted.done() or waiter.granted.cancelled():
                waiter.granted.cancel()
                self._queue.remove(waiter)
            elif waiter.granted.exception() is None:
                self._release(waiter.tenant)  # granted in the same turn of the loop in which we gave up
            if not isinstance(error, TimeoutError):
                raise
            if patience >= timeout_s:
                raise DeadlineExceeded("the request's deadline passed while it waited for admission") from error
            raise NoCapacity(
                f"no permit within {patience:g} s; {len(self._queue)} requests wait", retry_after_s=self.retry_after_s()
            ) from error

    def _may_run(self, name: str) -> bool:
        bound = self._tenant_of(name).max_in_flight
        return not bound or self._held.get(name, 0) < max(1, round(bound * self._limits.share))

    def _grant(self, name: str) -> None:
        self._in_flight += 1
        self._held[name] = self._held.get(name, 0) + 1
        self._idle.clear()

    def _release(self, name: str) -> None:
        self._releases.append(self._clock.now())
        self._in_flight -= 1
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]
        waiter = self._queue.pop(self._may_run)
        if waiter is not None:
            self._grant(waiter.tenant)
            waiter.granted.set_result(None)
        elif not self._in_flight:
            self._idle.set()


class Permit:
    """A scope that holds one permit; entered once."""

    __slots__ = ("_admission", "_ask", "_lease", "_tenant")

    def __init__(self, admission: Admission, tenant: str, ask: tuple[int, float, float, str]) -> None:
        """`ask`: priority, seconds to wait, cost and owner."""
        self._admission = admission
        self._tenant = tenant
        self._ask = ask
        self._lease: Lease | None = None

    async def __aenter__(self) -> None:
        self._lease = await self._admission.acquire(self._tenant, *self._ask)

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._lease is not None
        self._admission.release(self._tenant, self._lease)
