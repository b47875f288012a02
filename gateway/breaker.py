"""A circuit breaker per worker name: counts consecutive failures, and how long the worker is left alone.

Pure state over a passed-in `now`; knows no worker, no clock and no reason of a failure.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta


class BreakerRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `breaker`: when a breaker opens and for how long. Seconds."""

    threshold: Annotated[int, Meta(ge=1)] = 3
    """Consecutive failures that open it: one failed transfer never takes a worker out."""
    coalesce_s: Annotated[float, Meta(ge=0)] = 0.2
    """Failures closer together are one: when a worker dies, all its requests say so at once."""
    first_s: Annotated[float, Meta(gt=0)] = 0.5
    longest_s: Annotated[float, Meta(gt=0)] = 30.0


@dataclass(slots=True)
class Breaker:
    """Closed, open until a moment, or half open (one probe is out). Used by one thread."""

    rules: BreakerRules
    failures: int = 0
    open_until: float = 0.0
    probing: bool = False
    failed_at: float = float("-inf")

    def permits(self, now: float) -> bool:
        """True if work may be sent now; while half open only until the first probe is out."""
        return now >= self.open_until and not self.probing

    def dispatched(self) -> None:
        """Work was sent. If the breaker had opened, this is the one probe that decides."""
        if self.failures >= self.rules.threshold:
            self.probing = True

    def succeeded(self) -> None:
        """The worker did what it was asked: close."""
        self.failures = 0
        self.open_until = 0.0
        self.probing = False

    def undecided(self) -> None:
        """The probe ended without saying anything of the worker (its client left): allow another."""
        self.probing = False

    def failed(self, now: float, sent_at: float | None = None) -> None:
        """The worker failed at something that says it is ill; quarantine doubles with each further failure.

        What was sent (`sent_at`) before the last failure failed together with it; where that is not known, what came
        within `coalesce_s` did.
        """
        together = sent_at <= self.failed_at if sent_at is not None else now - self.failed_at < self.rules.coalesce_s
        if together and not self.probing:
            return
        self.failed_at = now
        self.probing = False
        self.failures += 1
        over = self.failures - self.rules.threshold
        if over >= 0:
            self.open_until = now + min(self.rules.longest_s, self.rules.first_s * 2.0 ** min(over, 30))
