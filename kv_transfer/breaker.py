"""Circuit breaker of one peer: after several failures in a row it is left alone for a while, then tried once. Pure."""

import enum

from core.clock import Clock


class BreakerState(enum.StrEnum):
    """CLOSED lets all through, OPEN none, HALF_OPEN one trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts peer-level failures only: a refusal or a lost lease is an answer, not a failure. One thread."""

    def __init__(self, clock: Clock, *, failures: int, min_s: float, max_s: float) -> None:
        self._clock = clock
        self._limit = failures
        self._min_s = min_s
        self._max_s = max_s
        self._failures = 0
        self._pause_s = min_s
        self._open_until = 0.0
        self._changed_at = clock.now()
        self.state = BreakerState.CLOSED

    def allow(self) -> bool:
        """True if the peer may be used now; in HALF_OPEN only the first caller may."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN and self._clock.now() >= self._open_until:
            self.state = BreakerState.HALF_OPEN
            return True
        return False

    def succeeded(self) -> None:
        """The peer did what it should."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = self._min_s
        self._changed_at = self._clock.now()

    def failed(self) -> None:
        """The peer could not be reached, broke off, or did not move bytes."""
        self._failures += 1
        self._changed_at = self._clock.now()
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(self._max_s, 2 * self._pause_s)
        elif self.state is BreakerState.OPEN or self._failures < self._limit:
            return
        self.state = BreakerState.OPEN
        self._open_until = self._clock.now() + self._pause_s

    def undecided(self) -> None:
        """A trial ended without a verdict: the next caller may try."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
            self._open_until = self._clock.now()

    @property
    def is_forgettable(self) -> bool:
        """True if a new breaker would do as well: nobody tries the peer now, and what it did is long ago."""
        idle_s = self._clock.now() - max(self._changed_at, self._open_until)
        return self.state is not BreakerState.HALF_OPEN and idle_s > 2 * self._max_s

    @property
    def retry_after_s(self) -> float:
        """Seconds until the next trial."""
        return max(0.0, self._open_until - self._clock.now())
