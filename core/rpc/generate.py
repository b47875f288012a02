"""Gateway <-> decode worker: one multiplexed stream per pair, one frame per engine step.

Server: `add_generate` adapts a `GenerateService`. Client: `GenerateClient.open` gives a `DecodeStream`.
Replay, merging and re-attachment are the service's and the gateway's business; this file only carries frames.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol

from grpc import aio
from msgspec import structs

from core.aio import within
from core.errors import BadRequest, WorkerLost
from core.rpc.channel import connect
from core.rpc.convert.stream import (
    gateway_frame_from_proto,
    gateway_frame_to_proto,
    step_frame_from_proto,
    step_frame_to_proto,
)
from core.rpc.duplex import ACCEPTED_KEY, Duplex
from core.rpc.pixels import PixelParts, take_apart
from core.rpc.proof import Proof
from core.rpc.server import RpcServer, write
from core.stream import AbortRequest, FromGateway, StepFrame, StreamHello, Submit
from tandem.v1 import generate_pb2 as pb
from tandem.v1 import generate_pb2_grpc

SERVICE = "tandem.v1.Generate"
HELLO_TIMEOUT_S = 5.0
BATCHES_KEY = "tandem-batches"
"""Initial metadata by which a worker says that it takes `GatewayFrames`; one that does not gets frame by frame."""
BATCH_BYTES = 1 << 20
"""Of the frames in one message, about; a larger frame travels alone."""
OUTBOX_FRAMES = 4096
"""Frames of one gateway process that may wait for one worker: more than a worker has rows."""

SendFrame = Callable[[StepFrame], Awaitable[None]]


class GenerateService(Protocol):
    """What a decode worker implements."""

    async def connect(self, hello: StreamHello, frames: AsyncIterator[FromGateway], send: SendFrame) -> None:
        """Serve one stream until `frames` ends or this coroutine is cancelled.

        Either may be a gateway that closed in order or one that broke off: gRPC does not tell them apart in time,
        so treat both as a stream that may be re-attached.
        Raising a `TandemError` before the first `anext(frames)` refuses the stream with that error (WorkerLost for
        another incarnation, Draining); the first read or `send` accepts it. `frames` yields no second hello.
        `send` returns when gRPC took the frame (its flow control is the back-pressure); frames go out in call
        order, and a caller that is gone raises `WorkerLost`. Returning or raising ends the stream. Asyncio thread.
        """
        ...


def add_generate(server: RpcServer, service: GenerateService) -> None:
    """Serve `service` on `server`."""

    async def serve(
        requests: AsyncIterator[pb.GatewayFrame], context: aio.ServicerContext[pb.GatewayFrame, pb.StepFrame]
    ) -> None:
        stream = _ServedStream(requests, context)
        hello = await stream.hello()
        await service.connect(hello, stream.frames(), stream.send)

    server.add_stream(SERVICE, "Connect", serve, pb.GatewayFrame.FromString)


class _ServedStream:
    """The worker's end of one stream: tells acceptance once, keeps writes one after the other."""

    def __init__(
        self,
        requests: AsyncIterator[pb.GatewayFrame],
        context: aio.ServicerContext[pb.GatewayFrame, pb.StepFrame],
    ) -> None:
        self._requests = requests
        self._context = context
        self._writing = asyncio.Lock()
        self._accepted = False

    async def hello(self) -> StreamHello:
        async with within(HELLO_TIMEOUT_S, "waiting for the first frame"):
            try:
                message = await anext(self._requests)
            except StopAsyncIteration:
                raise BadRequest("the stream ended before its hello") from None
        frame = gateway_frame_from_proto(message)
        if not isinstance(frame, StreamHello):
            raise BadRequest("the first frame of a stream must be its hello")
        return frame

    async def frames(self) -> AsyncIterator[FromGateway]:
        async with self._writing:
            await self._accept()
        pixels = PixelParts()
        async for message in self._requests:
            for each in message.batch.frames if message.HasField("batch") else (message,):
                frame = _taken(each, pixels)
                if frame is not None:
                    yield frame

    async def send(self, frame: StepFrame) -> None:
        async with self._writing:
            if not self._accepted:
                await self._accept()
            await write(self._context, step_frame_to_proto(frame))

    async def _accept(self) -> None:
        if not self._accepted:
            self._accepted = True
            await self._context.send_initial_metadata(((ACCEPTED_KEY, "1"), (BATCHES_KEY, "1")))


def _taken(message: pb.GatewayFrame, pixels: PixelParts) -> FromGateway | None:
    """Return the frame of a message; None: a part of one to come. Raises `BadRequest`."""
    if message.HasField("part"):
        pixels.add(message.part)
        return None
    frame = gateway_frame_from_proto(message)
    match frame:
        case StreamHello():
            raise BadRequest("a stream has only one hello")
        case Submit():
            return structs.replace(frame, request=pixels.put_together(str(frame.handle), frame.request))
        case AbortRequest():
            pixels.drop(str(frame.handle))
        case _:
            pass
    return frame


class DecodeStream:
    """The gateway's end of one stream. Asyncio thread; any number of senders, one consumer of `frames`."""

    def __init__(self, duplex: Duplex[pb.GatewayFrame, pb.StepFrame]) -> None:
        self._duplex = duplex

    def post(self, frame: FromGateway) -> None:
        """Queue a frame without waiting. Raises `WorkerLost` or `NoCapacity`."""
        for message in _messages(frame):
            self._duplex.post(message)

    async def send(self, frame: FromGateway) -> None:
        """Queue a frame, waiting for room. Raises `WorkerLost`. Cancelling one sender harms no other."""
        for message in _messages(frame):
            await self._duplex.send(message)

    async def frames(self) -> AsyncIterator[StepFrame]:
        """Yield frames until `close`. Raises `WorkerLost` or the worker's error at any other end of the stream."""
        while True:
            try:
                message = await self._duplex.read()
            except WorkerLost:
                if self._duplex.is_closing:
                    return
                raise
            try:
                frame = step_frame_from_proto(message)
            except BadRequest as error:
                # Not the gateway's request is bad: the peer is no worker of this version.
                raise WorkerLost(f"{self._duplex.peer} speaks another protocol: {error.message}") from error
            yield frame

    async def close(self) -> None:
        """Send what is queued, briefly, then end the stream; idempotent."""
        await self._duplex.close()


def _messages(frame: FromGateway) -> Iterator[pb.GatewayFrame]:
    """Yield a frame's messages: the parts of its pixels if there are many, then itself."""
    if isinstance(frame, Submit) and frame.request.mm_items:
        light, parts = take_apart(str(frame.handle), frame.request)
        for part in parts:
            yield pb.GatewayFrame(part=part)
        frame = structs.replace(frame, request=light)
    yield gateway_frame_to_proto(frame)


def batches(messages: list[pb.GatewayFrame]) -> Iterator[pb.GatewayFrame]:
    """Yield the same frames in as few messages as their size allows."""
    if len(messages) == 1:
        yield messages[0]
        return
    batch: list[pb.GatewayFrame] = []
    size = 0
    for message in messages:
        more = message.ByteSize()
        if batch and size + more > BATCH_BYTES:
            yield _joined(batch)
            batch, size = [], 0
        batch.append(message)
        size += more
    if batch:
        yield _joined(batch)


def _joined(messages: list[pb.GatewayFrame]) -> pb.GatewayFrame:
    return messages[0] if len(messages) == 1 else pb.GatewayFrame(batch=pb.GatewayFrames(frames=messages))


class GenerateClient:
    """Opens streams to decode workers on behalf of one gateway process."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof

    async def open(self, address: str, hello: StreamHello, timeout_s: float = 3.0) -> DecodeStream:
        """Connect, send the hello and wait until the worker took it; `timeout_s` bounds all of it.

        Raises `WorkerLost` (unreachable, too slow, or another incarnation lives there), `Draining`, or
        `ConfigError` (the secrets differ).
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        channel = await connect(address, timeout_s, self._proof.tls)
        call = generate_pb2_grpc.GenerateStub(channel).Connect(metadata=self._proof.metadata)
        duplex = Duplex(channel, call, f"decode worker {address}", OUTBOX_FRAMES)
        try:
            duplex.post(gateway_frame_to_proto(hello))
            said = await duplex.accepted(max(0.0, give_up_at - loop.time()))
            if BATCHES_KEY in said:
                duplex.join = batches
        except BaseException:
            await duplex.close(flush_s=0)
            raise
        return DecodeStream(duplex)
