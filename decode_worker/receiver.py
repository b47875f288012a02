"""One hand-over at D, start to end: book, pull, forward the first token, commit; and what to do when P is lost.

Before FINAL a lost or unwilling prefill worker is reported with a NeedPrefill record and the gateway names another.
After FINAL the client already has the first token: the rest is computed here, invisibly. Knows no gRPC.
"""

import asyncio
import logging
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from core.clock import Clock
from core.errors import Aborted, BadRequest, DeadlineExceeded, InvariantError, NoWorker, TandemError
from core.ids import Incarnation
from core.request import GenerateRequest
from core.stream import NeedPrefill, PrefillTarget
from decode_worker.hosting import EngineDesk
from decode_worker.ledger import RequestLedger
from decode_worker.placement import PrefillMode, computes_here
from decode_worker.requests import Phase, Request
from engine.events import SeqId
from engine.port import Booking
from kv_transfer.api import FirstTokens, OnFirst, Pulled

_LOG = logging.getLogger(__name__)
_OF_THE_REQUEST = (BadRequest, DeadlineExceeded, Aborted)
"""Errors of the request itself: no other prefill worker would answer differently."""


class PrefillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where prompts are computed."""

    mode: PrefillMode = PrefillMode.REMOTE
    auto_threshold_tokens: Annotated[int, Meta(ge=0)] = 128
    """AUTO: prompts with at most this many uncached tokens are computed here."""
    place_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """How long to wait for the gateway's answer to NeedPrefill."""


class Puller(Protocol):
    """The destination half of KV transfer (`kv_transfer.destination.Destination`)."""

    async def pull(
        self,
        *,
        request: GenerateRequest,
        seq: int,
        row: int,
        prefix_tokens: int,
        address: str,
        incarnation: Incarnation | None,
        timeout_s: float,
        on_first: OnFirst,
    ) -> Pulled:
        """Fetch one prompt's KV. On any failure or cancellation the sequence is dropped, exactly once."""
        ...


class Receiver:
    """Runs hand-overs; one task per request, owned by the service."""

    def __init__(
        self, config: PrefillConfig, desk: EngineDesk, ledger: RequestLedger, puller: Puller, clock: Clock
    ) -> None:
        self._config = config
        self._desk = desk
        self._ledger = ledger
        self._puller = puller
        self._clock = clock

    def computes_here(self, request: Request, prefix_tokens: int = 0) -> bool:
        """Decide where the prompt is computed, with what is known of this worker's own cache."""
        return computes_here(
            self._config.mode,
            has_target=request.target is not None,
            num_tokens=len(request.asked.token_ids),
            prefix_tokens=prefix_tokens,
            threshold_tokens=self._config.auto_threshold_tokens,
        )

    def compute_here(self, request: Request) -> None:
        """Queue the prompt (and what the client already has) on this engine."""
        request.move(Phase.LOCAL)

        def queued(result: SeqId | TandemError) -> None:
            if isinstance(result, TandemError):
                self._ledger.fail(request, result)
            else:
                self._ledger.bind(request, result)

        self._desk.submit(request.continued(), request.deadline, queued)

    async def run(self, request: Request) -> None:
        """Take a request to RUNNING or LOCAL; an error ends it. Cancelled by an abort."""
        failure: TandemError | None = None
        try:
            await self._take(request)
        except TandemError as error:
            failure = error
        except Exception:  # noqa: BLE001 - the top of a task: logged, and the request ends
            _LOG.exception("the hand-over of %s failed in our own code", request.asked.request_id)
            failure = InvariantError("the decode worker failed while it took this request over")
        finally:
            request.task = None
        if failure is not None:
            self._ledger.fail(request, failure)

    async def _take(self, request: Request) -> None:
        await self._desk.ready(request.asked.grammar)
        if self.computes_here(request):
            self.compute_here(request)
            return
        while True:
            booking = await self._book(request)
            target = request.target
            if target is None or self.computes_here(request, booking.prefix_tokens):
                self._give_back(request, booking.seq)
                self.compute_here(request)
                return
            request.move(Phase.PULLING)
            try:
                pulled = await self._pull(request, booking, target)
            except TandemError as error:
                # The pull dropped the sequence; nothing of it is bound any more.
                self._ledger.unbind(request)
                if request.has_ended:
                    return
                if request.first is not None:
                    self._ledger.count("recovered_here")
                    self.compute_here(request)
                    return
                request.target = await self._ask_for_another(request, target, error)
                if request.target is None:
                    self.compute_here(request)
                    return
                continue
            self._ledger.landed(request, pulled)
            self._desk.commit(booking.seq, pulled, lambda error: self._ledger.fail(request, error))
            return

    async def _book(self, request: Request) -> Booking:
        request.move(Phase.BOOKING)
        answer: asyncio.Future[Booking] = asyncio.get_running_loop().create_future()

        def booked(result: Booking | TandemError) -> None:
            if isinstance(result, Booking):
                self._bind(request, result.seq)
            if answer.done():
                return
            if isinstance(result, Booking):
                answer.set_result(result)
            else:
                answer.set_exception(result)

        self._desk.book(request.asked, request.deadline, lambda seq: self._bind(request, seq), booked)
        return await answer

    def _bind(self, request: Request, seq: SeqId) -> None:
        if request.has_ended:
            self._desk.give_back(seq)
        elif request.seq != seq and request.phase is Phase.BOOKING:
            self._ledger.bind(request, seq)

    def _give_back(self, request: Request, seq: SeqId) -> None:
        self._ledger.unbind(request)
        self._desk.give_back(seq)

    async def _pull(self, request: Request, booking: Booking, target: PrefillTarget) -> Pulled:
        def forward(first: FirstTokens) -> None:
            if not request.has_ended:
                self._ledger.forward_first(request, first)

        timeout_s = self._remaining_s(request)
        return await self._puller.pull(
            request=msgspec.structs.replace(request.asked, timeout_s=timeout_s),
            seq=booking.seq,
            row=booking.row,
            prefix_tokens=booking.prefix_tokens,
            address=target.address,
            incarnation=target.incarnation or None,
            timeout_s=timeout_s,
            on_first=forward,
        )

    async def _ask_for_another(
        self, request: Request, target: PrefillTarget, error: TandemError
    ) -> PrefillTarget | None:
        """Report the loss and wait for the gateway's choice; errors that no other P can cure are raised again."""
        remaining_s = self._remaining_s(request)
        if isinstance(error, _OF_THE_REQUEST):
            raise error
        request.move(Phase.NEED_PREFILL)
        request.place = asyncio.get_running_loop().create_future()
        request.stream.add_record(
            NeedPrefill(handle=request.handle, failed=target.worker_id, code=error.code, message=error.message)
        )
        self._ledger.count("need_prefill")
        try:
            async with asyncio.timeout(min(self._config.place_timeout_s, remaining_s)):
                return await request.place
        except TimeoutError as late:
            raise NoWorker("no other prefill worker was named in time", retry_after_s=1.0) from late
        finally:
            request.place = None

    def _remaining_s(self, request: Request) -> float:
        remaining_s = request.deadline - self._clock.now()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before its prompt was computed")
        return remaining_s
