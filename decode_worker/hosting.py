"""The engine as the asyncio thread sees it: calls carried to the scheduler thread, answers carried back in order.

An answer and the events of later steps arrive in the order in which the scheduler thread made them, so a sequence id
is known here before its first token is. Implements `kv_transfer.api.DestinationHost`; knows no requests and no wire.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from core.errors import InvariantError, TandemError
from core.request import FinishReason, GenerateRequest
from engine.events import SeqId
from engine.port import Booking, DestinationWork, LandingPages, LocalWork
from kv_transfer.api import FirstTokens, Pulled

T = TypeVar("T")


class DecodeEngine(LocalWork, DestinationWork, Protocol):
    """What a decode worker uses of the engine."""


class EngineCalls(Protocol):
    """The bridge to the scheduler thread (`engine.engine_thread.EngineThread`)."""

    async def call(self, fn: Callable[[DecodeEngine], T]) -> T:
        """Run `fn` on the scheduler thread and return its result; raises what it raised."""
        ...

    async def ready(self, grammar: str) -> None:
        """Return once a request with this grammar may be queued; raises `BadRequest` if none ever may."""
        ...

    def post(self, fn: Callable[[DecodeEngine], object], *, always: bool = False) -> None:
        """Run `fn` on the scheduler thread, in order of posting, and forget its result.

        `always`: accepted however many calls wait, because it gives back what one of them took.
        """
        ...


class EngineDesk:
    """Submits, books, lands, commits and aborts. Callbacks run on the asyncio thread."""

    def __init__(self, calls: EngineCalls, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = calls
        self._loop = loop

    async def ready(self, grammar: str) -> None:
        """Return once a request with this grammar may be queued; raises `BadRequest` if none ever may."""
        await self._calls.ready(grammar)

    def submit(
        self, request: GenerateRequest, deadline: float, on_result: Callable[[SeqId | TandemError], None]
    ) -> None:
        """Queue a sequence that this engine computes whole; `on_result` gets its id before any of its events come."""

        def run(engine: DecodeEngine) -> None:
            try:
                result: SeqId | TandemError = engine.submit(request, deadline)
            except TandemError as error:
                result = error
            self._loop.call_soon_threadsafe(on_result, result)

        self._calls.post(run)

    def book(
        self,
        request: GenerateRequest,
        deadline: float,
        on_seq: Callable[[SeqId], None],
        on_booked: Callable[[Booking | TandemError], None],
    ) -> None:
        """Queue for a booking. `on_seq` comes as soon as the id exists, `on_booked` when its turn came, in any order."""

        def booked(result: Booking | TandemError) -> None:
            self._loop.call_soon_threadsafe(on_booked, result)

        def run(engine: DecodeEngine) -> None:
            try:
                seq = engine.book(request, deadline, booked)
            except TandemError as error:
                booked(error)
            else:
                self._loop.call_soon_threadsafe(on_seq, seq)

        self._calls.post(run)

    def commit(self, seq: SeqId, pulled: Pulled, on_error: Callable[[TandemError], None]) -> None:
        """Join a validated hand-over to the batch; its first tokens count as emitted."""
        first: FirstTokens = pulled.first
        finish = FinishReason(first.finish) if first.finish else None

        def run(engine: DecodeEngine) -> None:
            try:
                engine.commit(seq, first.tokens, first.logprobs, finish, first.num_cached_tokens, floors=first.floors)
            except InvariantError:
                raise  # not this hand-over's: the pool is wrong, and the process ends
            except TandemError as error:
                # Every read of the pull is over, so none of its pages is open.
                engine.drop(seq, ())
                self._loop.call_soon_threadsafe(on_error, error)

        self._calls.post(run)

    def abort(self, seq: SeqId) -> None:
        """End a sequence of any kind within one step."""
        self._calls.post(lambda engine: engine.abort(seq), always=True)

    def give_back(self, seq: SeqId) -> None:
        """End a booking that no pull has taken: nothing was landed, so no page is open."""

        def run(engine: DecodeEngine) -> None:
            engine.abort(seq)
            engine.drop(seq, ())

        self._calls.post(run, always=True)

    # DestinationHost

    async def land(self, seq: int, start: int, end: int) -> tuple[int, ...]:
        """Allocate LANDING pages; waits for room. If this wait is cancelled, `drop` gives back what came too late."""
        answer: asyncio.Future[LandingPages] = self._loop.create_future()

        def settle(result: LandingPages | TandemError) -> None:
            if answer.done():
                return
            if isinstance(result, TandemError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def run(engine: DecodeEngine) -> None:
            try:
                engine.land(SeqId(seq), start, end, lambda result: self._hop(settle, result))
            except TandemError as error:
                self._hop(settle, error)

        self._calls.post(run)
        return (await answer).pages

    def drop(self, seq: int, open_pages: Sequence[int]) -> None:
        """The hand-over ended without commit."""
        pages = tuple(open_pages)
        self._calls.post(lambda engine: engine.drop(SeqId(seq), pages), always=True)

    def prove(self, pages: Sequence[int]) -> None:
        """Those pages are quiesced."""
        proven = tuple(pages)
        self._calls.post(lambda engine: engine.prove(proven), always=True)

    def _hop(self, settle: Callable[[LandingPages | TandemError], None], result: LandingPages | TandemError) -> None:
        self._loop.call_soon_threadsafe(settle, result)
