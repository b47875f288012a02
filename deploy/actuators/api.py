"""What the controller asks of a place that runs workers: this machine, Ray or Kubernetes.

Actuators only ensure and remove; when to do either is the controller's decision. Every change carries the fence of the
controller that asks, so that a controller which lost its lock can no longer change anything.
"""

from typing import Protocol

import msgspec

from core.errors import ConfigError

FENCE_CODE = "stale_fence: "
"""Begins the message of a StaleFence that crosses a process border as text."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process as its place sees it."""

    id: str
    role: str
    """prefill | decode"""
    state: str
    """starting | ready | draining | backoff | held | gone"""
    reason: str = ""
    domain: str = ""


class StaleFence(ConfigError):
    """Another controller has taken over; this one must stop acting."""

    code = "stale_fence"


class Actuator(Protocol):
    """Sizes the pools of one cluster. Calls of one actuator are not concurrent."""

    async def list(self) -> tuple[Instance, ...]:
        """Return every worker that exists or will be started again, sorted by id."""
        ...

    async def ensure(self, role: str, count: int, *, fence: int) -> None:
        """Start missing workers until `count` of a role exist that are not leaving; returns once they are ordered.

        Does not wait until they are ready. Never removes: a pool that is larger already stays. Raises ConfigError for an unknown role or a count that
        the place cannot hold, StaleFence if a larger fence was seen before.
        """
        ...

    async def remove(self, worker_id: str, *, fence: int) -> None:
        """Drain exactly this worker, wait until it is gone, and lower its pool's count by one.

        An unknown or already gone worker is no error: the call is idempotent. Raises StaleFence as `ensure`.
        """
        ...

    def describe(self) -> dict[str, object]:
        """Return plain facts for people and logs: place, cluster, addresses."""
        ...


class FenceGate:
    """Remembers the largest fence seen; every actuator holds one."""

    def __init__(self) -> None:
        self._highest = 0

    def check(self, fence: int) -> None:
        """Pass a fence that is not older than any before; raises StaleFence."""
        if fence < self._highest:
            raise StaleFence(f"controller {fence} was replaced by controller {self._highest}; this one must stop")
        self._highest = fence
