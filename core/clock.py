"""Time as an injected thing: a Protocol, the system's clock, and a clock that only moves when told.

Library code never reads `time` itself; wall-clock time is for logs only.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; comparable only within one process."""

    def now(self) -> float:
        """Return monotonic seconds as float."""
        ...


class SystemClock:
    """The process's monotonic clock."""

    now = staticmethod(time.monotonic)
    """As the contract says; not a method around it, because it is asked dozens of times a request."""


class ManualClock:
    """A clock for tests and simulations; moves only by `advance`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the current manual time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward; moving back is a bug of the caller."""
        if seconds < 0:
            raise ValueError("a monotonic clock cannot go back")
        self._now += seconds
