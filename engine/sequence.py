"""The cold record of one sequence, and the one table of states it may go through.

Touched on admission, chunk ends and the end; never in a steady decode step (that is the row table's business).
Used by the scheduler thread only.

::

    submit, submit_source: WAITING ─► PREFILLING ─► RUNNING ─► ENDED       (source: PREFILLING ─► HELD ─► ENDED)
    book:                  BOOKING ─► BOOKED ─► LANDING ─► RUNNING
    out of pages:          PREFILLING | RUNNING ─► RETRACTED ─► PREFILLING
    abort under transfer:  LANDING ─► ABANDONED ─► ENDED                    (waits for `drop`)
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError, TandemError
from core.ids import PageHash
from core.kv import PageRef
from core.request import Floors, GenerateRequest
from engine.cache.receipt import Receipt
from engine.events import SeqId
from engine.port import Booking
from engine.stage import WHOLE, Prefix, Stage

I32 = npt.NDArray[np.int32]


class SeqState(enum.Enum):
    """Where a sequence is in its life; see the module's drawing."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    HELD = "held"
    RETRACTED = "retracted"
    BOOKING = "booking"
    BOOKED = "booked"
    LANDING = "landing"
    ABANDONED = "abandoned"
    ENDED = "ended"


_NEXT: dict[SeqState, frozenset[SeqState]] = {
    SeqState.WAITING: frozenset({SeqState.PREFILLING, SeqState.ENDED}),
    SeqState.PREFILLING: frozenset({SeqState.RUNNING, SeqState.HELD, SeqState.RETRACTED, SeqState.ENDED}),
    SeqState.RUNNING: frozenset({SeqState.RETRACTED, SeqState.ENDED}),
    SeqState.HELD: frozenset({SeqState.ENDED}),
    SeqState.RETRACTED: frozenset({SeqState.PREFILLING, SeqState.ENDED}),
    SeqState.BOOKING: frozenset({SeqState.BOOKED, SeqState.ENDED}),
    SeqState.BOOKED: frozenset({SeqState.LANDING, SeqState.ENDED}),
    SeqState.LANDING: frozenset({SeqState.RUNNING, SeqState.ABANDONED, SeqState.ENDED}),
    SeqState.ABANDONED: frozenset({SeqState.ENDED}),
    SeqState.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of this engine. While it has a row, the row's arrays hold its lengths, tokens and pages."""

    id: SeqId
    request: GenerateRequest
    deadline: float
    arrival: int
    """Order of arrival at this engine; kept over retractions."""
    is_source: bool
    """Prefill for somebody else: the first token is reported, then the sequence is held until release."""
    state: SeqState
    tokens: npt.NDArray[np.int32]
    """Known ids when the sequence last had no row."""
    hashes: list[PageHash]
    """Chain of the full pages of `tokens`, extended as outputs fill pages."""
    chains: dict[tuple[int, ...], list[PageHash]] = field(default_factory=dict)
    """Chains by the hits they go on behind; `hashes` is one of them."""
    floors: Floors | None = None
    """Replay floors, from the first admission on; None before."""
    prefix: Prefix | None = None
    """What was locked of the cache last."""
    stage: Stage = WHOLE
    """What is computed of the prompt now."""
    row: int = -1
    receipt: Receipt | None = None
    num_cached_tokens: int = -1
    """What the first attempt found cached; -1 until known."""
    has_started: bool = False
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    """Tokens whose KV existed here before, computed or landed: computing them again is counted."""
    preempts: int = 0
    deferrals: int = 0
    """Passes in which it waited for another sequence that computes the same page."""
    on_booked: Callable[[Booking | TandemError], None] | None = None
    booked_pages: int = 0
    """Pages that the booked prompt needs in all, its prefix included."""
    announced: list[PageRef] = field(default_factory=list)
    """Pages told to the destination, from position 0."""
    announced_tokens: int = 0

    @property
    def num_prompt(self) -> int:
        """Prompt tokens of the request, over all attempts."""
        return self.request.num_prompt_tokens

    def kv_limit(self, max_len: int, pool_tokens: int) -> int:
        """Return the tokens of it that KV may ever hold; the last token, a source's first one, is never written."""
        return min(len(self.tokens) if self.is_source else max_len - 1, pool_tokens)

    def move(self, to: SeqState) -> None:
        """Enter `to`; raises `InvariantError` on a move that the table does not allow."""
        if to not in _NEXT[self.state]:
            raise InvariantError(f"sequence {self.id} cannot go from {self.state.value} to {to.value}")
        self.state = to
