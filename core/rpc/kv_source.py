"""Destination <-> source: the control link of hand-overs over gRPC.

Matches `kv_transfer.api.LinkDialer` and `ControlLink` by shape and knows nothing of leases or pages.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from grpc import aio
from msgspec import structs

from core.aio import Mailbox
from core.errors import BadRequest, NoCapacity, TandemError, WorkerLost
from core.handover import Abort, FromD, FromP, Prepare
from core.rpc.channel import connect
from core.rpc.convert.handover import (
    from_destination_from_proto,
    from_destination_to_proto,
    from_source_from_proto,
    from_source_to_proto,
)
from core.rpc.duplex import Duplex
from core.rpc.pixels import PixelParts, take_apart
from core.rpc.proof import Proof
from core.rpc.server import RpcServer, write
from tandem.v1 import kv_source_pb2 as pb
from tandem.v1 import kv_source_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE = "tandem.v1.KvSource"
OUTBOX_MESSAGES = 4096
INBOX_MESSAGES = 1024


class KvSourceLink(Protocol):
    """The source's view of one destination."""

    async def handle(self, message: FromD) -> None:
        """Take one message; messages of a link are handled one after the other.

        Raising a `TandemError` ends the link with that error (NAMESPACE_MISMATCH after a bad hello).
        """
        ...

    def closed(self) -> None:
        """The link is gone, for whatever reason; called exactly once, after the last `handle`."""
        ...


class KvSourceService(Protocol):
    """What a worker that offers KV implements; `kv_transfer.source.Source` does."""

    def open_link(self, send: Callable[[FromP], None]) -> KvSourceLink:
        """A destination connected. `send` queues an answer without waiting; after the end it does nothing."""
        ...


def add_kv_source(server: RpcServer, service: KvSourceService) -> None:
    """Serve `service` on `server`."""

    async def serve(
        requests: AsyncIterator[pb.FromDestination], context: aio.ServicerContext[pb.FromDestination, pb.FromSource]
    ) -> None:
        await _ServedLink(requests, context).run(service)

    server.add_stream(SERVICE, "Link", serve, pb.FromDestination.FromString)


class _ServedLink:
    """The source's end of one link: a reader that handles, a writer that empties the outbox."""

    def __init__(
        self,
        requests: AsyncIterator[pb.FromDestination],
        context: aio.ServicerContext[pb.FromDestination, pb.FromSource],
    ) -> None:
        self._requests = requests
        self._context = context
        self._outbox: Mailbox[FromP] = Mailbox(OUTBOX_MESSAGES)
        self._overflowed = False

    async def run(self, service: KvSourceService) -> None:
        link = service.open_link(self._send)
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read_all(link), name="kv source reader")
        writer = loop.create_task(self._write_all(), name="kv source writer")
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if self._overflowed:
                raise NoCapacity(f"the destination left {OUTBOX_MESSAGES} messages unread; the link is closed")
            if reader.done():
                # Answers to the last messages still go out before an orderly end or an error.
                self._outbox.close()
                await asyncio.wait((writer,), timeout=1.0)
                await reader
            else:
                await writer
        finally:
            self._outbox.close()
            reader.cancel()
            writer.cancel()
            try:
                await asyncio.gather(reader, writer, return_exceptions=True)
            finally:
                link.closed()

    def _send(self, message: FromP) -> None:
        if not self._outbox.post(message) and not self._outbox.is_closed:
            self._overflowed = True
            self._outbox.close()

    async def _read_all(self, link: KvSourceLink) -> None:
        pixels = PixelParts()
        async for message in self._requests:
            if message.HasField("part"):
                pixels.add(message.part)
                continue
            told = from_destination_from_proto(message)
            match told:
                case Prepare():
                    told = structs.replace(told, request=pixels.put_together(told.transfer, told.request))
                case Abort():
                    pixels.drop(told.transfer)
                case _:
                    pass
            await link.handle(told)

    async def _write_all(self) -> None:
        while messages := await self._outbox.get_all():
            if self._overflowed:
                return
            for message in messages:
                await write(self._context, from_source_to_proto(message))


class KvSourceClientLink:
    """D's end of a link. `receive` may be cancelled or timed out without harm; asyncio thread; one receiver."""

    def __init__(self, duplex: Duplex[pb.FromDestination, pb.FromSource]) -> None:
        self._duplex = duplex
        self._inbox: Mailbox[FromP] = Mailbox(INBOX_MESSAGES)
        self._error: TandemError | None = None
        self._pump = asyncio.get_running_loop().create_task(self._read_all(), name=f"reader of {duplex.peer}")

    async def _read_all(self) -> None:
        try:
            while True:
                await self._inbox.put(self._decoded(await self._duplex.read()))
        except TandemError as error:
            self._error = error
        except Exception as error:
            logger.exception("the reader of %s crashed", self._duplex.peer)
            self._error = WorkerLost(f"the link to {self._duplex.peer} broke: {error}")
        finally:
            self._inbox.close()

    def _decoded(self, message: pb.FromSource) -> FromP:
        try:
            return from_source_from_proto(message)
        except BadRequest as error:
            # Not our request is bad: the peer is no worker of this version.
            raise WorkerLost(f"{self._duplex.peer} speaks another protocol: {error.message}") from error

    async def send(self, message: FromD) -> None:
        """Queue one message, waiting for room; raises `WorkerLost` (or the source's error) if the link is gone."""
        if self._error is not None:
            raise self._error
        if isinstance(message, Prepare):
            light, parts = take_apart(message.transfer, message.request)
            for part in parts:
                await self._duplex.send(pb.FromDestination(transfer=message.transfer, part=part))
            message = structs.replace(message, request=light)
        await self._duplex.send(from_destination_to_proto(message))

    async def receive(self) -> FromP:
        """Wait for the next message; raises the error that ended the link: `WorkerLost`, or what the source raised."""
        message = await self._inbox.get()
        if message is None:
            raise self._error or WorkerLost(f"the link to {self._duplex.peer} is closed")
        return message

    async def close(self) -> None:
        """Send what is queued, briefly, then close; idempotent."""
        await self._duplex.close()
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)


class KvSourceDialer:
    """Opens control links on behalf of one worker."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof

    async def dial(self, address: str, timeout_s: float) -> KvSourceClientLink:
        """Connect to a source; no message is sent yet. Raises `WorkerLost`."""
        channel = await connect(address, timeout_s, self._proof.tls)
        call = kv_source_pb2_grpc.KvSourceStub(channel).Link(metadata=self._proof.metadata)
        return KvSourceClientLink(Duplex(channel, call, f"prefill worker {address}", OUTBOX_MESSAGES))
