"""The owner of source pages: starts prompts on the engine for hand-overs and tells the transfer layer what became of them.

Implements `kv_transfer.api.SourceHost`. Asyncio thread only; knows no transport, no lease and no gRPC.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from core.clock import Clock
from core.errors import TandemError
from core.handover import TokenLogprobs
from core.kv import PageRef
from core.request import Floors, GenerateRequest
from core.tracing.api import NullTracer, Span, Tracer, Value
from engine.events import ChunkFinal, FailedHere, Prefilled, SeqId, StepEvents
from engine.port import SourceWork

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class SourceCalls(Protocol):
    """The bridge to the scheduler thread (`engine.engine_thread.EngineThread`)."""

    def look(self, fn: Callable[[SourceWork], T]) -> T:
        """Run `fn`, which any thread may, here and now; raises `WorkerLost` after the engine has stopped."""
        ...

    async def ready(self, grammar: str) -> None:
        """Return once a request with this grammar may be queued; raises `BadRequest` if none ever may."""
        ...

    def post(self, fn: Callable[[SourceWork], object], *, always: bool = False) -> None:
        """Run `fn` on the scheduler thread, in order of posting, and forget its result.

        `always`: accepted however many calls wait, because it gives back what one of them took.
        """
        ...


class HandOvers(Protocol):
    """The serving half of KV transfer (`kv_transfer.source.Source`): what it must hear of its sequences."""

    def chunk_final(self, seq: int, start: int, end: int, pages: tuple[PageRef, ...], hits: tuple[int, ...]) -> None:
        """Pages of tokens [start, end) are final; they belong to a computation behind replay hits `hits`."""
        ...

    def prefilled(
        self,
        seq: int,
        *,
        num_tokens: int,
        first_tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        num_cached_tokens: int,
        finish: str,
        row: int,
        row_generation: int,
        floors: Floors,
    ) -> None:
        """The prompt is in KV and the first token is chosen."""
        ...

    def failed(self, seq: int, error: TandemError) -> None:
        """The sequence ended badly."""
        ...


SourceEvent = ChunkFinal | Prefilled | FailedHere


class PrefillService:
    """Source sequences of this worker. `connect` it to the transfer layer before the first `start`."""

    def __init__(
        self, calls: SourceCalls, clock: Clock, loop: asyncio.AbstractEventLoop, tracer: Tracer | None = None
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._loop = loop
        self._tracer = tracer or NullTracer()
        self._spans: dict[SeqId, Span] = {}
        self._hand_overs: HandOvers | None = None
        self._prompts_total = 0
        self._failed_total = 0
        self._prompt_tokens_total = 0

    def connect(self, hand_overs: HandOvers) -> None:
        """Name the receiver of events."""
        self._hand_overs = hand_overs

    # SourceHost

    async def start(self, request: GenerateRequest, timeout_s: float) -> int:
        """Queue a prompt; returns its sequence id. If the caller is cancelled meanwhile, the sequence is released."""
        deadline = self._clock.now() + timeout_s
        await self._calls.ready(request.grammar)
        answer: asyncio.Future[SeqId] = self._loop.create_future()

        span = self._tracer.start(
            "prefill",
            parent=request.traceparent,
            attributes={"request_id": request.request_id, "prompt_tokens": len(request.token_ids)},
        )

        def queued(result: SeqId | TandemError) -> None:
            if isinstance(result, TandemError):
                span.end(error=result.message)
                if not answer.done():
                    answer.set_exception(result)
            elif answer.done():
                span.end(error="stopped")
                self.stop(result)
            else:
                self._spans[result] = span
                answer.set_result(result)

        def run(engine: SourceWork) -> None:
            try:
                result: SeqId | TandemError = engine.submit_source(request, deadline)
            except TandemError as error:
                result = error
            self._loop.call_soon_threadsafe(queued, result)

        self._calls.post(run)
        try:
            seq = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.stop(answer.result())
            raise
        self._prompts_total += 1
        return seq

    def stop(self, seq: int) -> None:
        """Unpin; in any state; idempotent."""
        self._end_span(seq, error="stopped")
        self._calls.post(lambda engine: engine.release(SeqId(seq)), always=True)

    def epochs_unchanged(self, seq: int) -> bool:
        """Return whether all pages announced for the sequence are still its own.

        Not asked of the scheduler thread: that may be waiting for a chunk of another prompt, and a client for its token.
        """
        return self._calls.look(lambda engine: engine.epochs_unchanged(SeqId(seq)))

    # Events

    def on_step(self, events: StepEvents) -> None:
        """Pass on what one pass of the engine produced; news may come before the caller of `start` resumes."""
        for event in (*events.chunks, *events.prefilled, *events.failed):
            self._tell(event)

    def _tell(self, event: SourceEvent) -> None:
        assert self._hand_overs is not None
        match event:
            case ChunkFinal():
                self._hand_overs.chunk_final(event.seq, event.start, event.end, event.pages, event.hits)
            case Prefilled():
                self._prompt_tokens_total += event.num_tokens
                self._end_span(event.seq, {"cached_tokens": event.num_cached_tokens})
                self._hand_overs.prefilled(
                    event.seq,
                    num_tokens=event.num_tokens,
                    first_tokens=event.first_tokens,
                    logprobs=event.logprobs,
                    num_cached_tokens=event.num_cached_tokens,
                    finish=event.finish.value if event.finish else "",
                    row=event.row,
                    row_generation=event.row_generation,
                    floors=event.floors,
                )
            case FailedHere():
                self._failed_total += 1
                self._end_span(event.seq, error=event.error.message)
                self._hand_overs.failed(event.seq, event.error)

    def _end_span(self, seq: int, attributes: Mapping[str, Value] | None = None, error: str = "") -> None:
        span = self._spans.pop(SeqId(seq), None)
        if span is not None:
            span.end(attributes, error)

    def statistics(self) -> dict[str, float]:
        """Return counters by name."""
        return {
            "prompts_total": self._prompts_total,
            "prompts_failed_total": self._failed_total,
            "prompt_tokens_total": self._prompt_tokens_total,
        }
