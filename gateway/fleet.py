"""The workers as arrays: one slot per worker, one numpy array per fact, so that routing is arithmetic.

The directory writes it, routing reads it; both in the event loop's thread. Slots are reused after a worker is gone.
Knows no ids, no clocks and no policy. Units: tokens, pages, seconds.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MODE_LOCAL, MODE_REMOTE, MODE_AUTO = 0, 1, 2
MODES = {"local": MODE_LOCAL, "remote": MODE_REMOTE, "auto": MODE_AUTO}
"""`Registration.prefill_mode` as a number."""


@dataclass(slots=True)
class Fleet:
    """All arrays have one entry per slot. A slot is in use iff `used`."""

    used: Bools
    prefill: Bools
    decode: Bools
    ready: Bools
    """Connected and READY by its last report."""
    probing: Bools
    """Its breaker is half open and the one probe is out."""
    lease_until: Floats
    open_until: Floats
    """The breaker admits nothing before this moment."""
    model: Ints
    fingerprint: Ints
    domain: Ints
    kind: Ints
    """Workers of one kind cost the same."""
    transports: Ints
    """Bit set of interned transport names; 0: not told."""
    mode: Ints
    key: Ints
    """Stable number of the worker's name: equal in every gateway process."""
    page_tokens: Ints
    max_tokens: Ints
    replay_tokens: Ints
    """Tokens before the end of a cached prefix that are computed again there."""
    num_pages: Ints
    rows: Ints
    pages_free: Ints
    """Free or evictable, by the last report."""
    rate: Floats
    """Prefill tokens per second by the last report; 0: not known."""
    base_s: Floats
    token_s: Floats
    square_s: Floats
    """Measured cost of a prompt: fixed, per uncached token, per uncached x context token; `token_s` 0: not yet known."""
    step_s: Floats
    foreign_tokens: Floats
    foreign_requests: Floats
    """Of the last report, what is not ours: waiting prompt tokens, and requests running or waiting."""
    own_tokens: Floats
    own_s: Floats
    own_prompts: Floats
    """Sent by this gateway and not yet prefilled: uncached tokens, their predicted seconds, and how many prompts."""
    head_s: Floats
    head_since: Floats
    """Of these the one in front: its predicted seconds, and when it came to the front."""
    own_requests: Floats
    """Sent by this gateway and not yet ended."""
    recent_s: Floats
    """Decayed seconds of prefill work given to this worker."""

    @classmethod
    def empty(cls, capacity: int) -> "Fleet":
        """Return arrays of `capacity` unused slots."""
        kinds = {Bools: np.bool_, Floats: np.float64, Ints: np.int64}
        return cls(**{field.name: np.zeros(capacity, dtype=kinds[field.type]) for field in fields(cls)})  # pyright: ignore[reportArgumentType] dataclass field types are the aliases above

    @property
    def capacity(self) -> int:
        """Number of slots, used or not."""
        return len(self.used)

    def grow(self, capacity: int) -> None:
        """Replace every array by a longer one, zero-filled at its end."""
        for field in fields(self):
            old = getattr(self, field.name)
            new = np.zeros(capacity, dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, field.name, new)

    def clear(self, slot: int) -> None:
        """Set every fact of a slot to zero."""
        for field in fields(self):
            getattr(self, field.name)[slot] = 0

    def own_queue_s(self, now: float) -> Floats:
        """Predicted seconds until all prompts of ours are computed: what is left of the first, and the others."""
        return self.own_s - np.minimum(np.maximum(now - self.head_since, 0.0), self.head_s)

    def live_requests(self) -> Floats:
        """Requests at each worker: ours are known at once, the others' by the last report."""
        return self.own_requests + self.foreign_requests
