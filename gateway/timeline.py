"""When things happened to one sample, for requests that ask to be told (`timing: true`).

Seconds of this process's monotonic clock, as the gateway saw it: what workers did shows when they told of it.
"""

from dataclasses import dataclass, fields
from typing import Any

_NS = 1_000_000_000


@dataclass(slots=True)
class Timeline:
    """Written by whoever sees it happen; None: it did not. Written once, so that a retry keeps the first time."""

    arrived: float | None = None
    """The request's headers."""
    tokenized: float | None = None
    admitted: float | None = None
    submitted: float | None = None
    """To the decode worker that was chosen first."""
    prompt_computed: float | None = None
    """The first worker told so, with or before the first token."""
    handed_over: float | None = None
    """Everything had landed at the decode worker, and was validated."""
    first_token: float | None = None
    last_token: float | None = None
    attempts: int = 0
    bytes_pulled: int = 0
    cached_tokens: int = 0
    prefill_worker: str = ""
    """Of the last attempt; empty: the decode worker computed the prompt itself."""
    decode_worker: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return it for clients: times in whole nanoseconds."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: round(value * _NS) if isinstance(value, float) else value for name, value in values.items()}
