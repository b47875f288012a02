"""The client's half of one bidirectional call, made safe to share: own channel, one writer, errors as `TandemError`.

gRPC cancels a whole call when a task that waits in `write` is cancelled; so callers only post to a bounded outbox and
one writer task, owned here, does the writing. Knows no message.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar, cast

import grpc
from grpc import aio

from core.aio import Mailbox
from core.errors import NoCapacity, TandemError, WorkerLost
from core.rpc.status import from_status, rebuild

Out = TypeVar("Out")
In = TypeVar("In")
Join = Callable[[list[Out]], Iterable[Out]]

ACCEPTED_KEY = "tandem-accepted"
"""Initial metadata by which a service says that it took the stream's first message."""
FLUSH_S = 0.5
"""How long `close` waits for posted messages and the peer's end of stream."""


class Duplex(Generic[Out, In]):
    """One open call and its channel; closes both. Asyncio thread; one reader; any number of senders."""

    def __init__(self, channel: aio.Channel, call: aio.StreamStreamCall[Out, In], peer: str, outbox: int) -> None:
        self.peer = peer
        self.join: Join[Out] | None = None
        """Makes fewer messages of those that wait; a message costs more than what is in it."""
        self._channel = channel
        self._call = call
        self._outbox: Mailbox[Out] = Mailbox(outbox)
        self._closing = False
        self._writer = asyncio.get_running_loop().create_task(self._write_all(), name=f"writer to {peer}")

    async def _write_all(self) -> None:
        try:
            while items := await self._outbox.get_all():
                for item in items if self.join is None else self.join(items):
                    await self._call.write(item)
            await self._call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError, aio.UsageError):
            # The reader reports why; senders must not queue for a dead peer.
            self._outbox.close()
        except asyncio.CancelledError:
            self._outbox.close()
            if _cancellations():
                raise

    def post(self, message: Out) -> None:
        """Queue without waiting. Raises `WorkerLost` (the call is over) or `NoCapacity` (the peer does not read)."""
        if self._outbox.post(message):
            return
        if self._outbox.is_closed or self._call.done():
            raise WorkerLost(f"the connection to {self.peer} is lost")
        raise NoCapacity(f"{self.peer} does not read fast enough: {self._outbox.capacity} messages wait")

    async def send(self, message: Out) -> None:
        """Queue, waiting for room; cancel-safe. Raises `WorkerLost`. Says nothing about arrival."""
        if self._call.done() or not await self._outbox.put(message):
            raise WorkerLost(f"the connection to {self.peer} is lost")

    async def accepted(self, timeout_s: float) -> Mapping[str, Any]:
        """Wait until the service took the stream and return what it said with that.

        Raises the error that it refused with, or `WorkerLost`.
        """
        cancellations = _cancellations()
        try:
            async with asyncio.timeout(timeout_s):
                metadata = dict(await self._call.initial_metadata())
                if ACCEPTED_KEY not in metadata:
                    raise await self._end()
                return metadata
        except TimeoutError as error:
            raise WorkerLost(f"{self.peer} did not accept the stream in time") from error
        except aio.AioRpcError as error:
            raise from_status(error, self.peer) from error
        except asyncio.CancelledError:
            if _cancellations() > cancellations:
                raise
            raise WorkerLost(f"the stream to {self.peer} was closed here") from None

    async def read(self) -> In:
        """Wait for the next message. Raises the peer's error, or `WorkerLost` at any end of the stream.

        Cancelling a read ends the call (gRPC's rule).
        """
        cancellations = _cancellations()
        try:
            message = await self._call.read()
        except aio.AioRpcError as error:
            raise from_status(error, self.peer) from error
        except asyncio.InvalidStateError as error:
            raise await self._end() from error
        except asyncio.CancelledError:
            if _cancellations() > cancellations:
                raise
            raise WorkerLost(f"the stream to {self.peer} was closed here") from None
        if message is aio.EOF:
            raise await self._end()
        if message is None:
            # gRPC's way to say that it could not parse the bytes.
            raise WorkerLost(f"{self.peer} sent bytes that are no message of ours")
        return cast("In", message)

    async def _end(self) -> TandemError:
        status = await self._call.code()
        if status is grpc.StatusCode.OK:
            return WorkerLost(f"{self.peer} closed the stream")
        trailing: dict[str, Any] = dict(await self._call.trailing_metadata() or ())
        return rebuild(status, await self._call.details() or "", trailing, self.peer)

    @property
    def is_closing(self) -> bool:
        """True from the first `close` on."""
        return self._closing

    async def close(self, flush_s: float = FLUSH_S) -> None:
        """Send what was posted, within `flush_s`, then end the call and its connection; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._outbox.close()
        cancellations = _cancellations()
        try:
            if flush_s > 0:
                async with asyncio.timeout(flush_s):
                    await asyncio.shield(self._writer)
                    await self._call.code()
        except (TimeoutError, aio.AioRpcError):
            pass
        except asyncio.CancelledError:
            if _cancellations() > cancellations:
                raise
        finally:
            self._call.cancel()
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            await self._channel.close()


def _cancellations() -> int:
    # A call that was cancelled here raises CancelledError in its users too: an ended stream, no cancellation of
    # their task. Only a count that grew meanwhile means the latter.
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
