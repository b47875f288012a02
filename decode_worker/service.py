"""The Generate service of a decode worker: takes frames of gateways, runs requests, drains.

One `connect` per connection; the stream behind it outlives it (`decode_worker.streams`). Asyncio thread only; knows
no gRPC: `core.rpc.generate` carries the frames.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from core.aio import Tasks
from core.clock import Clock
from core.errors import BadRequest, Draining
from core.stream import AbortRequest, Ack, FromGateway, Place, StepFrame, StreamHello, Submit
from core.tracing.api import NullTracer, Tracer
from decode_worker.ledger import RequestLedger
from decode_worker.receiver import Receiver
from decode_worker.requests import Request
from decode_worker.streams import Attachment, GatewayStream, GatewayStreams
from engine.events import StepEvents

_LOG = logging.getLogger(__name__)
Send = Callable[[StepFrame], Awaitable[None]]

_TICK_S = 0.1
_FLUSH_S = 2.0
"""After the last request of a drain: how long gateways get to acknowledge its records."""


class DecodeService:
    """Owns all requests of this worker; implements `core.rpc.generate.GenerateService`."""

    def __init__(
        self,
        *,
        streams: GatewayStreams,
        ledger: RequestLedger,
        receiver: Receiver,
        tasks: Tasks,
        clock: Clock,
        tracer: Tracer | None = None,
    ) -> None:
        self._streams = streams
        self._ledger = ledger
        self._receiver = receiver
        self._tasks = tasks
        self._clock = clock
        self._tracer = tracer or NullTracer()
        self._draining = False
        self._changed = asyncio.Event()

    async def connect(self, hello: StreamHello, frames: AsyncIterator[FromGateway], send: Send) -> None:
        """Serve one connection of a gateway until it ends; raises `WorkerLost` if it means another incarnation."""
        stream, replaced = self._streams.open(hello)
        if replaced is not None:
            self._ledger.give_up_stream(replaced)
        attachment = stream.attach()
        _LOG.info("gateway %s attached, frames after %d wanted", hello.gateway, hello.resume_after)
        parts = (
            asyncio.create_task(self._read(stream, attachment, frames), name="gateway-reader"),
            asyncio.create_task(self._write(stream, attachment, send), name="gateway-writer"),
            asyncio.create_task(attachment.superseded.wait(), name="gateway-superseded"),
        )
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            try:
                await asyncio.gather(*parts, return_exceptions=True)
            finally:
                # Whoever cancels the call meanwhile: a stream that stayed attached would never expire.
                self._streams.detach(stream, attachment)
                _LOG.info("gateway %s detached", hello.gateway)

    def on_step(self, events: StepEvents) -> None:
        """Take what one pass of the engine produced."""
        self._ledger.apply(events)
        self._changed.set()

    def expire(self) -> None:
        """Give up the requests of gateways that stayed away too long."""
        for stream in self._streams.expire():
            _LOG.warning("gateway %s stayed away; its requests are aborted", stream.gateway)
            self._ledger.give_up_stream(stream)
        self._changed.set()

    async def keep_time(self) -> None:
        """Call `expire` regularly, for as long as the worker lives."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.expire()

    # Leaving.

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def finished(self) -> None:
        """Wait until every request ended and every attached gateway has its records."""
        await self._until(lambda: self._ledger.num_live == 0)
        await self._flush()

    async def hand_back(self) -> None:
        """End the requests that are left so that their gateways resume them elsewhere."""
        for request in self._ledger.live():
            self._ledger.fail(request, Draining("this worker is going away; the request goes on elsewhere"))
        await self._flush()

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._until(lambda: self._streams.is_flushed)
        except TimeoutError:
            _LOG.warning("a gateway left records unacknowledged for %.1f s", _FLUSH_S)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    def statistics(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        return {**self._ledger.statistics(), **self._streams.statistics(), "draining": float(self._draining)}

    # Frames.

    async def _read(self, stream: GatewayStream, attachment: Attachment, frames: AsyncIterator[FromGateway]) -> None:
        async for frame in frames:
            if attachment.superseded.is_set():
                return
            self._take(stream, frame)

    def _take(self, stream: GatewayStream, frame: FromGateway) -> None:
        match frame:
            case Submit():
                self._submit(stream, frame)
            case AbortRequest():
                request = self._ledger.find(stream, frame.handle)
                if request is not None:
                    self._ledger.give_up(request)
            case Place():
                request = self._ledger.find(stream, frame.handle)
                if request is not None and request.place is not None and not request.place.done():
                    request.place.set_result(frame.prefill)
            case Ack():
                stream.acknowledge(frame.sequence)
            case StreamHello():
                raise BadRequest("a stream says hello once, with its first frame")
        self._changed.set()

    def _submit(self, stream: GatewayStream, frame: Submit) -> None:
        deadline = self._clock.now() + frame.request.timeout_s
        asked = frame.request
        span = self._tracer.start(
            "decode",
            parent=asked.traceparent,
            attributes={
                "request_id": asked.request_id,
                "attempt": asked.attempt,
                "prompt_tokens": len(asked.token_ids),
            },
        )
        asked = msgspec.structs.replace(asked, traceparent=span.traceparent)
        request = Request(stream, frame.handle, asked, frame.prefill, deadline, span=span)
        if not self._ledger.add(request):
            _LOG.warning(
                "handle %d of gateway %s was submitted twice; the first one goes on", frame.handle, stream.gateway
            )
            return
        if self._draining:
            self._ledger.fail(request, Draining("this worker takes no new requests"))
            return
        if not request.asked.grammar and self._receiver.computes_here(request):
            self._receiver.compute_here(request)
        else:
            request.task = self._tasks.spawn(self._receiver.run(request), name=f"hand-over {frame.handle}")

    async def _write(self, stream: GatewayStream, attachment: Attachment, send: Send) -> None:
        while not attachment.superseded.is_set():
            await stream.wakeup.wait()
            stream.wakeup.clear()
            # A superseded connection must not take frames that its successor replays.
            while not attachment.superseded.is_set() and (frame := stream.next_frame()) is not None:
                await send(frame)
