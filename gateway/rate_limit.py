"""Requests and tokens per minute of each tenant: token buckets over an injected clock.

A request is counted when it is admitted, its prompt with it, its output when it has ended: nothing is reserved, a
bucket may go below zero, and then further requests wait until it is filled again. Knows no HTTP and no keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

from core.clock import Clock
from core.errors import NoCapacity
from gateway.tenants import Tenant

WINDOW_S = 60.0
MAX_IDLE_BUCKETS = 4096


@dataclass(slots=True)
class Bucket:
    """Filled at `rate` per second up to one window's worth."""

    rate: float
    level: float
    at: float

    def fill(self, rate: float, now: float) -> None:
        """Bring it up to `now`, and to a limit that may have changed."""
        self.level = min(rate * WINDOW_S, self.level + (now - self.at) * rate)
        self.rate, self.at = rate, now

    def wait_s(self, amount: float) -> float:
        """Return seconds until `amount` is there; a request larger than the bucket waits for a full one."""
        missing = min(amount, self.rate * WINDOW_S) - self.level
        return max(0.0, missing / self.rate)


@dataclass(frozen=True, slots=True)
class Standing:
    """What a tenant is told of one limit."""

    limit: int
    remaining: int
    reset_s: float
    """Until the bucket is full."""


class RateLimits:
    """All buckets of one gateway process, which grants `share` of each limit. Event loop's thread only."""

    def __init__(self, clock: Clock, share: Callable[[], float] = lambda: 1.0) -> None:
        self._clock = clock
        self._share = share
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def admit(self, tenant: Tenant, prompt_tokens: int) -> None:
        """Count a request and its prompt, or raise `NoCapacity` that says when to come back and count nothing."""
        if not self._buckets and tenant.requests_per_minute <= 0 and tenant.tokens_per_minute <= 0:
            return
        found = [
            (bucket, amount)
            for kind, amount in (("requests", 1.0), ("tokens", float(prompt_tokens)))
            if (bucket := self._bucket(tenant, kind)) is not None
        ]
        wait_s = max((bucket.wait_s(amount) for bucket, amount in found), default=0.0)
        if wait_s > 0:
            raise NoCapacity(
                f"the rate limit of tenant {tenant.name} is reached; try again in {wait_s:.0f} s", retry_after_s=wait_s
            )
        for bucket, amount in found:
            bucket.level -= amount

    def spend(self, tenant: Tenant, output_tokens: int) -> None:
        """Count the output of a request that has ended, however it did."""
        bucket = self._bucket(tenant, "tokens")
        if bucket is not None:
            bucket.level -= output_tokens

    def standing(self, tenant: Tenant, kind: str) -> Standing | None:
        """Return where the tenant stands with its `requests` or `tokens`; None: no such limit."""
        bucket = self._bucket(tenant, kind)
        if bucket is None:
            return None
        full = bucket.rate * WINDOW_S
        return Standing(round(full), max(0, int(bucket.level)), (full - bucket.level) / bucket.rate)

    def _bucket(self, tenant: Tenant, kind: str) -> Bucket | None:
        per_minute = tenant.requests_per_minute if kind == "requests" else tenant.tokens_per_minute
        if per_minute <= 0:
            if self._buckets:
                self._buckets.pop((tenant.name, kind), None)
            return None
        now, rate = self._clock.now(), per_minute * self._share() / WINDOW_S
        bucket = self._buckets.get((tenant.name, kind))
        if bucket is None:
            if len(self._buckets) >= MAX_IDLE_BUCKETS:
                self._forget_full(now)
            bucket = self._buckets[tenant.name, kind] = Bucket(rate, rate * WINDOW_S, now)
        else:
            bucket.fill(rate, now)
        return bucket

    def _forget_full(self, now: float) -> None:
        """Drop buckets that would be full: a new one says the same."""
        for key, bucket in list(self._buckets.items()):
            bucket.fill(bucket.rate, now)
            if bucket.level >= bucket.rate * WINDOW_S:
                del self._buckets[key]
