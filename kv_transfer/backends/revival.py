"""One engine that is opened when needed and opened anew, after a pause that grows, when it has broken or was fenced."""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from core.clock import Clock
from core.errors import ConfigError, TransferFailed

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
CALM_S = 60.0
"""One that lived for so long is opened again without a pause worth mentioning."""
logger = logging.getLogger(__name__)


class Mortal(Protocol):
    """What can break and be closed."""

    @property
    def broken(self) -> bool:
        """True once it is of no use."""
        ...

    def close(self) -> None:
        """Fence it; idempotent."""
        ...


T = TypeVar("T", bound=Mortal)


class Revival(Generic[T]):
    """Thread-safe. `open_one(n)` opens the n-th generation, from 1; it may raise ConfigError."""

    def __init__(self, what: str, open_one: Callable[[int], T], clock: Clock) -> None:
        self._what = what
        self._open_one = open_one
        self._clock = clock
        self._lock = threading.Lock()
        self._current: T | None = None
        self._generation = 0
        self._opened_at = 0.0
        self._not_before = float("-inf")
        self._pause_s = MIN_PAUSE_S
        self._closed = threading.Event()
        self.num_restarts = 0

    def get(self) -> T:
        """Return the living one, opening it if need be. Raises TransferFailed (too soon, or closed) or ConfigError."""
        with self._lock:
            if self._closed.is_set():
                raise TransferFailed(f"{self._what} is closed")
            if self._current is not None:
                if not self._current.broken:
                    return self._current
                self._drop(self._current)
            now = self._clock.now()
            if now < self._not_before:
                raise TransferFailed(f"{self._what} is opened again in {self._not_before - now:.1f} s")
            try:
                self._current = self._open_one(self._generation + 1)
            except ConfigError:
                self._postpone(now)
                raise
            self._generation += 1
            self.num_restarts = self._generation - 1
            self._opened_at = self._clock.now()
            return self._current

    def living(self) -> T:
        """As `get`, without opening anything and without waiting for who does."""
        current = self._current
        if current is None or current.broken:
            raise TransferFailed(f"{self._what} is being opened again")
        return current

    def fence(self, one: T) -> None:
        """Close this one for good, unless that has happened: the proof for what it posted. The next `get` opens anew."""
        with self._lock:
            if self._current is one:
                self._drop(one)

    def revive(self) -> None:
        """Open anew as soon as it may be; returns when that has succeeded or `close` was called. Blocks."""
        while not self._closed.wait(max(0.0, self._not_before - self._clock.now())):
            with contextlib.suppress(TransferFailed):
                try:
                    self.get()
                except ConfigError as error:
                    logger.warning("%s cannot be opened again: %s", self._what, error)
                else:
                    return

    def close(self) -> None:
        """Fence what lives and open nothing more; idempotent."""
        self._closed.set()
        with self._lock:
            if self._current is not None:
                self._current.close()
                self._current = None

    def _drop(self, one: T) -> None:
        one.close()
        self._current = None
        now = self._clock.now()
        if now - self._opened_at >= CALM_S:
            self._pause_s = MIN_PAUSE_S
        self._postpone(now)

    def _postpone(self, now: float) -> None:
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
