"""One multiplexed stream to one decode worker: commands out, step frames in, dispatched to mailboxes.

A broken connection is re-attached from the last frame seen; what the worker cannot have got for certain is failed,
so that its owner tries again under a new handle. If re-attachment fails, every mailbox sees `WorkerLost`. Knows no
routing, no retries and no text. Event loop's thread only.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from core.clock import Clock
from core.errors import Aborted, TandemError, WorkerLost, from_code
from core.handover import TokenLogprobs
from core.ids import Handle, Incarnation
from core.request import GenerateRequest
from core.stream import (
    AbortRequest,
    Ack,
    Errored,
    Finished,
    FromGateway,
    Logprobs,
    NeedPrefill,
    Place,
    PrefillTarget,
    Record,
    Started,
    StepFrame,
    StreamHello,
    Submit,
)
from core.worker import Registration
from gateway.mailbox import Failure, Mailbox

logger = logging.getLogger(__name__)

MAX_REMEMBERED_ABORTS = 4096
ABORT_AGAIN_S = 1.0


class Stream(Protocol):
    """An open stream to a worker (`core.rpc.generate.DecodeStream`)."""

    def post(self, frame: FromGateway) -> None:
        """Queue a frame without waiting; raises `WorkerLost` or `NoCapacity`."""
        ...

    def frames(self) -> AsyncIterator[StepFrame]:
        """Yield frames; raises a `TandemError` when the stream breaks."""
        ...

    async def close(self) -> None:
        """End the stream; idempotent."""
        ...


class Opener(Protocol):
    """Opens streams (`core.rpc.generate.GenerateClient`)."""

    async def open(self, address: str, hello: StreamHello, timeout_s: float = 3.0) -> Stream:
        """Connect and be accepted, or raise a `TandemError`."""
        ...


class LinkRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `links`: times are seconds."""

    reattach_s: Annotated[float, Meta(gt=0)] = 3.0
    """How long a broken connection may be re-attached: no longer than the worker keeps frames."""
    max_tries: Annotated[int, Meta(ge=1)] = 3
    """Failed openings in a row after which the worker is taken for dead: a live process accepts at once."""
    backoff_s: Annotated[float, Meta(ge=0)] = 0.05
    ack_s: Annotated[float, Meta(gt=0, le=1)] = 0.1
    max_pending_tokens: Annotated[int, Meta(ge=1)] = 65_536
    """Tokens one request's consumer may be behind before it is cut off."""


@dataclass(slots=True)
class _Entry:
    mailbox: Mailbox
    confirmed: bool = False
    """Something came back after the last command: the worker has it for certain."""


class WorkerLink:
    """The stream to one incarnation of a decode worker, over all its connections."""

    def __init__(
        self, worker: Registration, *, gateway: Incarnation, opener: Opener, clock: Clock, rules: LinkRules
    ) -> None:
        self.worker = worker
        self._gateway = gateway
        self._opener = opener
        self._clock = clock
        self._rules = rules
        self._entries: dict[int, _Entry] = {}
        self._stream: Stream | None = None
        self._unsent: list[FromGateway] = []
        self._aborted: OrderedDict[int, float] = OrderedDict()
        self._sequence = 0
        self._acked = 0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._attached_before = False
        self._runner: asyncio.Task[Any] | None = None
        self.error: TandemError | None = None
        """Why the link is over; None while it may still be used."""
        self.last_frame_at = clock.now()
        self.num_frames = 0
        self.expired = False
        """The worker's lease ran out; if it is silent here too, it is lost."""
        self.departed = False
        """The worker said goodbye: the link ends with its last request."""

    # Commands

    def submit(self, handle: Handle, request: GenerateRequest, prefill: PrefillTarget | None) -> Mailbox:
        """Send a request; what comes back is in the mailbox. Raises `WorkerLost` if the link is over."""
        if self.error is not None:
            raise WorkerLost(self.error.message)
        mailbox = Mailbox(self._rules.max_pending_tokens)
        self._entries[handle] = _Entry(mailbox)
        self._post(Submit(handle=handle, request=request, prefill=prefill))
        return mailbox

    def place(self, handle: Handle, prefill: PrefillTarget | None) -> None:
        """Answer a NeedPrefill."""
        entry = self._entries.get(handle)
        if entry is not None:
            entry.confirmed = False
            self._post(Place(handle=handle, prefill=prefill))

    def release(self, handle: Handle, reason: str) -> None:
        """Stop to care about a handle; the worker is told unless it ended the handle itself. Idempotent."""
        if self._entries.pop(handle, None) is not None:
            self._abort(handle, reason)

    @property
    def num_open(self) -> int:
        """Handles not ended."""
        return len(self._entries)

    # Life

    async def run(self) -> None:
        """Keep the stream up until `lose` or cancellation; then every open handle has failed."""
        self._runner = asyncio.current_task()
        try:
            while self.error is None:
                stream = await self._attach()
                if stream is None:
                    return
                try:
                    async for frame in stream.frames():
                        self._dispatch(frame)
                except TandemError as error:
                    logger.info("stream to %s broke: %s", self.worker.worker_id, error.message)
                finally:
                    self._stream = None
                    await stream.close()
        finally:
            self._runner = None
            self.lose(WorkerLost(f"the link to {self.worker.worker_id} was closed"))

    def lose(self, error: TandemError) -> None:
        """The worker is gone: fail every open handle. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        self._unsent.clear()
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.mailbox.note(Failure(WorkerLost(error.message), by_worker=False))

    async def _attach(self) -> Stream | None:
        deadline = self._clock.now() + self._rules.reattach_s
        tries = 0
        while True:
            try:
                stream = await self._opener.open(
                    self.worker.address,
                    StreamHello(
                        gateway=self._gateway,
                        worker=self.worker.incarnation,
                        resume_after=self._sequence if self._attached_before else -1,
                    ),
                    max(0.1, deadline - self._clock.now()),
                )
            except TandemError as error:
                tries += 1
                if tries >= self._rules.max_tries or self._clock.now() >= deadline:
                    logger.warning("no stream to %s: %s", self.worker.worker_id, error.message)
                    self.lose(WorkerLost(f"decode worker {self.worker.worker_id} is lost: {error.message}"))
                    return None
                await asyncio.sleep(self._rules.backoff_s * 2 ** (tries - 1))
                continue
            if self.error is not None:
                await stream.close()
                return None
            self._attached(stream)
            return stream

    def _attached(self, stream: Stream) -> None:
        """Send what waited; fail what was under way when the last connection broke and was never answered."""
        waiting, self._unsent = self._unsent, []
        self._stream = stream
        self.last_frame_at = self._clock.now()
        if self._attached_before:
            fresh = {frame.handle for frame in waiting if isinstance(frame, (Submit, Place))}
            for handle, entry in list(self._entries.items()):
                if not entry.confirmed and handle not in fresh:
                    del self._entries[handle]
                    message = f"the connection to {self.worker.worker_id} broke before it answered"
                    entry.mailbox.note(Failure(WorkerLost(message), by_worker=False))
                    self._abort(handle, "the connection broke")
        self._attached_before = True
        for frame in waiting:
            self._post(frame)

    # Frames

    def _dispatch(self, frame: StepFrame) -> None:
        if frame.sequence <= self._sequence:
            return
        self._sequence = frame.sequence
        self.num_frames += 1
        self.last_frame_at = self._clock.now()
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(self._rules.ack_s, self._ack)
        records = frame.records
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {
            record.handle: record.items for record in records if isinstance(record, Logprobs)
        }
        entries, tokens, start = self._entries, list(frame.tokens), 0
        for handle, position, count in zip(frame.handles, frame.positions, frame.counts, strict=True):
            end = start + count
            entry = entries.get(handle)
            if entry is None:
                self._abort(handle, "unknown handle")
            else:
                entry.confirmed = True
                items = logprobs.get(handle, ()) if logprobs else ()
                if not entry.mailbox.deliver(position, tokens[start:end], items):
                    self._cut_off(handle, entry)
            start = end
        for record in records:
            if not isinstance(record, Logprobs):
                self._record(record)

    def _record(self, record: Record) -> None:
        entry = self._entries.get(record.handle)
        if entry is None:
            if isinstance(record, (Started, NeedPrefill)):
                self._abort(record.handle, "unknown handle")
            return
        entry.confirmed = True
        match record:
            case Started() | NeedPrefill():
                entry.mailbox.note(record)
            case Finished():
                del self._entries[record.handle]
                entry.mailbox.note(record)
            case Errored():
                del self._entries[record.handle]
                error = from_code(record.code, record.message, retry_after_s=record.retry_after_s or None)
                entry.mailbox.note(Failure(error, by_worker=True))
            case Logprobs():
                pass

    def _cut_off(self, handle: int, entry: _Entry) -> None:
        del self._entries[handle]
        self._abort(handle, "the client reads too slowly")
        entry.mailbox.note(Failure(Aborted("the client reads too slowly; the request was ended"), by_worker=False))

    def _ack(self) -> None:
        self._ack_timer = None
        if self._stream is not None and self._acked < self._sequence:
            self._acked = self._sequence
            self._post(Ack(sequence=self._sequence))

    def _abort(self, handle: int, reason: str) -> None:
        """Tell the worker, but not again for each frame that was already under way."""
        now = self._clock.now()
        if now - self._aborted.get(handle, float("-inf")) < ABORT_AGAIN_S:
            return
        self._aborted[handle] = now
        self._aborted.move_to_end(handle)
        if len(self._aborted) > MAX_REMEMBERED_ABORTS:
            self._aborted.popitem(last=False)
        self._post(AbortRequest(handle=Handle(handle), reason=reason))

    def _post(self, frame: FromGateway) -> None:
        if self._stream is not None:
            try:
                self._stream.post(frame)
            except WorkerLost:
                pass  # the reader is about to see the same; the frame is sent after re-attachment
            except TandemError as error:
                # The worker reads nothing: no way to tell it anything any more, but for the end of the stream.
                self.lose(error)
                if self._runner is not None:
                    self._runner.cancel()
                return
            else:
                return
        if self.error is None and not isinstance(frame, Ack):
            self._unsent.append(frame)
