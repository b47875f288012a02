"""Where loopback transports of one process find each other, instead of a module global.

Knows no bytes: it holds what a source exported until the source withdraws it. Thread-safe.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from core.ids import Incarnation
from kv_transfer.api import Op, SourceGuard
from kv_transfer.views import Bytes

Pace = Callable[[Op, int], None]
"""Called on the copying thread before each step with the op and the bytes landed; may wait or raise a TandemError."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The regions of one source and the guard that its readers must ask."""

    views: Mapping[int, Bytes]
    guard: SourceGuard


class Exchange:
    """A meeting place. `pace` slows, fails or holds reads: the loopback transport is a test double as well."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace
        self._offers: dict[Incarnation, Offer] = {}
        self._lock = threading.Lock()

    def publish(self, incarnation: Incarnation, offer: Offer) -> None:
        """Make a source findable."""
        with self._lock:
            self._offers[incarnation] = offer

    def find(self, incarnation: Incarnation) -> Offer | None:
        """Return what that source offers, if it is here."""
        with self._lock:
            return self._offers.get(incarnation)

    def withdraw(self, incarnation: Incarnation) -> None:
        """The source is gone; idempotent."""
        with self._lock:
            self._offers.pop(incarnation, None)
