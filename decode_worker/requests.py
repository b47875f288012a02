"""The life of one request on a decode worker: an explicit state machine and the record that carries it.

::

    NEW ─► LOCAL ───────────────────────────► RUNNING ─► ENDED
     └──► BOOKING ─► PULLING ─► (commit) ───────▲
             │           │  P lost before FINAL ─► NEED_PREFILL ─► BOOKING | LOCAL
             └─► LOCAL ◄─┘  P lost after FINAL: recompute here

Every state may go to ENDED. Used on the asyncio thread only; knows neither engine nor wire.
"""

import asyncio
import enum

import msgspec

from core.errors import InvariantError
from core.ids import Handle
from core.request import GenerateRequest, with_floors
from core.stream import PrefillTarget
from core.tracing.api import NullSpan, Span
from decode_worker.streams import GatewayStream
from engine.events import SeqId
from kv_transfer.api import FirstTokens


class Phase(enum.StrEnum):
    """What the request waits for."""

    NEW = "new"
    LOCAL = "local"
    """This engine computes the prompt; no token yet."""
    BOOKING = "booking"
    """Queued for a row and a booking."""
    PULLING = "pulling"
    """A prefill worker computes, pages land."""
    NEED_PREFILL = "need_prefill"
    """The prefill worker was lost or refused; the gateway is asked for another."""
    RUNNING = "running"
    """In the batch of this engine."""
    ENDED = "ended"


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.NEW: frozenset({Phase.LOCAL, Phase.BOOKING, Phase.ENDED}),
    Phase.LOCAL: frozenset({Phase.RUNNING, Phase.ENDED}),
    Phase.BOOKING: frozenset({Phase.PULLING, Phase.LOCAL, Phase.ENDED}),
    Phase.PULLING: frozenset({Phase.RUNNING, Phase.NEED_PREFILL, Phase.LOCAL, Phase.ENDED}),
    Phase.NEED_PREFILL: frozenset({Phase.BOOKING, Phase.LOCAL, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Request:
    """One handle of one gateway stream, from Submit to its one terminal record."""

    def __init__(
        self,
        stream: GatewayStream,
        handle: Handle,
        asked: GenerateRequest,
        target: PrefillTarget | None,
        deadline: float,
        *,
        span: Span | None = None,
    ) -> None:
        self.stream = stream
        self.handle = handle
        self.asked = asked
        self.target = target
        self.deadline = deadline
        self.span = span or NullSpan()
        self.phase = Phase.NEW
        self.seq: SeqId | None = None
        """The engine's sequence that works for this request now, once known."""
        self.first: FirstTokens | None = None
        """Set once FINAL's tokens were forwarded: from then on they must never be chosen again."""
        self.recomputed_tokens = 0
        self.task: asyncio.Task[None] | None = None
        """The hand-over in progress; cancelled by an abort."""
        self.place: asyncio.Future[PrefillTarget | None] | None = None
        """Set while the gateway is asked for another prefill worker."""

    def move(self, to: Phase) -> None:
        """Enter `to`; raises `InvariantError` on a move that the table does not allow."""
        if to not in _NEXT[self.phase]:
            raise InvariantError(f"request {self.asked.request_id} cannot go from {self.phase} to {to}")
        self.phase = to
        if to is Phase.ENDED:
            self.span.end({"output_tokens": self.num_output_tokens, "recomputed_tokens": self.recomputed_tokens})
        else:
            self.span.note(to)

    @property
    def has_ended(self) -> bool:
        """True once the terminal record was written (or the request was aborted)."""
        return self.phase is Phase.ENDED

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the client has or will get from earlier attempts and from FINAL."""
        return self.asked.num_output_tokens + (len(self.first.tokens) if self.first else 0)

    def cached_tokens(self, found: int) -> int:
        """Return the figure to report: the first attempt's if there was one, else `found`."""
        return self.asked.num_cached_tokens if self.asked.num_cached_tokens >= 0 else found

    def continued(self) -> GenerateRequest:
        """Return what this engine must compute itself: the prompt plus every output token sent on so far."""
        if self.first is None:
            return self.asked
        again = msgspec.structs.replace(
            self.asked,
            token_ids=self.asked.token_ids + self.first.tokens,
            num_cached_tokens=self.cached_tokens(self.first.num_cached_tokens),
        )
        return with_floors(again, self.first.floors)
