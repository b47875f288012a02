"""How workers use the engine: three small Protocols, all called on the scheduler thread only.

`engine.engine.Engine` implements all three; `engine.engine_thread.EngineThread` carries calls over from asyncio.
Roles are built by composition: a prefill worker uses `SourceWork`, a decode worker `LocalWork` and `DestinationWork`.
Deadlines are on the engine's injected clock (seconds).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import TandemError
from core.handover import TokenLogprobs
from core.request import FinishReason, Floors, GenerateRequest
from core.worker import Load
from engine.events import SeqId


@dataclass(frozen=True, slots=True)
class Booking:
    """D's promise to itself: row taken, own prefix locked, pages of the rest counted but not allocated."""

    seq: SeqId
    prefix_tokens: int
    """Page-aligned tokens that this engine already holds for the request."""
    row: int


@dataclass(frozen=True, slots=True)
class LandingPages:
    """Pages (state LANDING, owned by this transfer) for token range [start, end), from page start // page_tokens."""

    seq: SeqId
    start: int
    end: int
    pages: tuple[int, ...]


class LocalWork(Protocol):
    """Prompt and decode on this engine."""

    def submit(self, request: GenerateRequest, deadline: float) -> SeqId:
        """Queue a sequence; raises BadRequest/NeverFits/NoCapacity. Ends with FinishedHere or FailedHere."""
        ...

    def abort(self, seq: SeqId) -> None:
        """End a sequence of any kind within one step; no event answers. Unknown or ended ids are ignored."""
        ...

    def load(self) -> Load:
        """Return the load report (state filled in by the worker)."""
        ...

    def audit(self) -> list[str]:
        """Check every invariant; return one plain sentence per violation."""
        ...


class SourceWork(Protocol):
    """Prefill for somebody else: emits ChunkFinal, Prefilled (or FailedHere); pages and row stay until `release`."""

    def submit_source(self, request: GenerateRequest, deadline: float) -> SeqId:
        """Queue a prompt; its first token is sampled here, then the sequence is HELD."""
        ...

    def release(self, seq: SeqId) -> None:
        """End a source sequence in any state: full pages may stay in the tree, the rest is freed by fence."""
        ...

    def epochs_unchanged(self, seq: SeqId) -> bool:
        """True if every page announced for `seq`, whose prompt is computed, still has the epoch it was announced with.

        Any thread: a page has its next epoch before anything is written to it, so True now proves every earlier read.
        """
        ...


class DestinationWork(Protocol):
    """Sequences whose prompt KV comes from elsewhere. Pages: LANDING -> PRIVATE by commit, else -> UNPROVEN -> FREE."""

    def book(
        self, request: GenerateRequest, deadline: float, on_booked: Callable[[Booking | TandemError], None]
    ) -> SeqId:
        """Queue for a row and a booking, strictly FIFO; `on_booked` is called on this thread, maybe at once."""
        ...

    def land(self, seq: SeqId, start: int, end: int, on_pages: Callable[[LandingPages | TandemError], None]) -> None:
        """Allocate LANDING pages for [start, end); may wait for retraction.

        The first range may begin below the booked prefix: clipped to it, or, with replay, the prefix is given up from
        there on, because the source's pages are of another kind.
        """
        ...

    def commit(
        self,
        seq: SeqId,
        first_tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
        num_cached_tokens: int,
        *,
        floors: Floors | None = None,
    ) -> None:
        """The hand-over was validated: pages become PRIVATE/TREE and the sequence joins the batch.

        `floors` are those that the source computed with; the sequence keeps them if it must be computed again.

        The first tokens count as emitted already (the worker forwarded them at FINAL): no event repeats them.
        With `finish` the sequence only gives its pages to the tree and FinishedHere follows.
        """
        ...

    def drop(self, seq: SeqId, open_pages: Sequence[int]) -> None:
        """The hand-over ended without commit: `open_pages` may still be written, they become UNPROVEN."""
        ...

    def prove(self, pages: Sequence[int]) -> None:
        """Free UNPROVEN pages. Only ever called with the pages of an operation for which `quiesced()` was true."""
        ...
