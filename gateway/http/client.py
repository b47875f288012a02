"""One client connection during one answer: sending, and noticing that the client left or takes nothing.

Speaks bare ASGI. Knows no routes, no formats and no cluster.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from core.errors import Aborted
from gateway.http.direct import DirectWriter
from gateway.http.errors import HttpFault

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class ClientGone(Aborted):
    """Nobody reads the answer any more; `cause` is `left` or `slow`."""

    def __init__(self, cause: str) -> None:
        super().__init__("the client left" if cause == "left" else "the client takes nothing")
        self.cause = cause


class Client:
    """The sending side of one answer, and its progress."""

    def __init__(self, send: Send, direct: DirectWriter | None = None) -> None:
        """`direct`: the server's short way, if it offers one."""
        self._send = send
        self._direct = self.direct = direct
        self.request_id = ""
        """Ours, for the log; known once the request is accepted."""
        self.status = 0
        """Of the answer; 0 until it starts."""
        self.is_streaming = False
        self.is_complete = False
        """The last byte was handed over: what the server calls a disconnect from now on is only the end."""
        self.num_sends = 0
        self.is_sending = False
        self._chunk: dict[str, Any] = {"type": "http.response.body", "body": b"", "more_body": True}

    async def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer."""
        length = (b"content-length", b"%d" % len(body))
        await self._begin(status, [*headers, length], body, is_last=True)

    async def start_stream(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes = b"", *, is_last: bool = False
    ) -> None:
        """Send status, headers and what there is of the body; chunks follow, unless this is the last."""
        self.is_streaming = True
        await self._begin(status, list(headers), body, is_last=is_last)

    async def stream(self, body: bytes) -> None:
        """Send part of a streamed body; waits while the connection's buffer is full."""
        # The dict is reused: the server reads it before it returns, and one is needed per token.
        self._chunk["body"] = body
        self.is_sending = True
        await self._send(self._chunk)
        self.is_sending = False
        self.num_sends += 1

    @property
    def takes_now(self) -> bool:
        """True if `stream_now` may be called: the answer streams, and nothing stands in its way."""
        return self.is_streaming and self._direct is not None and self._direct.is_open

    def stream_now(self, body: bytes) -> None:
        """As `stream`, at once."""
        assert self._direct is not None
        self._direct.write(body)
        self.num_sends += 1

    async def interject(self, body: bytes) -> None:
        """Send part of a streamed body from beside the one who streams: no progress of the answer."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_stream(self, body: bytes = b"") -> None:
        """Send the last part of a streamed body."""
        self.is_complete = True
        await self._write({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, *, is_last: bool) -> None:
        """Send the head and what follows it, in one piece if the server lets us."""
        self.status = status
        head = {"type": "http.response.start", "status": status, "headers": headers}
        rest = {"type": "http.response.body", "body": body, "more_body": not is_last}
        if self._direct is None or not self._direct.may_join:
            await self._write(head)
            self.is_complete = is_last
            if body or is_last:
                await self._write(rest)
            return
        self.is_complete = is_last
        with self._direct.join():
            await self._write(head)
            if body or is_last:
                await self._write(rest)

    async def _write(self, message: dict[str, Any]) -> None:
        self.is_sending = True
        await self._send(message)
        self.is_sending = False
        self.num_sends += 1


class ClientWatch:
    """A scope that ends with `ClientGone` as soon as the client leaves, or takes nothing for `slow_s` seconds.

    The body must have been read before. Works like `asyncio.timeout`: it cancels the task that entered it.
    """

    def __init__(self, client: Client, receive: Receive, slow_s: float) -> None:
        self._client = client
        self._receive = receive
        self._slow_s = slow_s
        self._work: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._seen = -1
        self._cancelling = 0
        self._cause: str | None = None

    async def __aenter__(self) -> Self:
        self._work = asyncio.current_task()
        assert self._work is not None
        self._cancelling = self._work.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._slow_s, self._look)
        if self._client.direct is not None:
            self._client.direct.watch(self._left)
        else:
            self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._work is not None
        assert self._timer is not None
        self._timer.cancel()
        if self._client.direct is not None:
            self._client.direct.unwatch()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._cause is None:
            return
        still_cancelled = self._work.uncancel() > self._cancelling
        if kind is not None and issubclass(kind, asyncio.CancelledError) and not still_cancelled:
            raise ClientGone(self._cause) from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        if not self._client.is_complete:
            self._end("left")

    def _look(self) -> None:
        """Whoever was sending at the last look and has not got further since is cut off."""
        if self._client.is_sending and self._client.num_sends == self._seen:
            self._end("slow")
            return
        self._seen = self._client.num_sends
        self._timer = asyncio.get_running_loop().call_later(self._slow_s, self._look)

    def _end(self, cause: str) -> None:
        assert self._work is not None
        if self._cause is None:
            self._cause = cause
            self._work.cancel()


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float, direct: DirectWriter | None = None
) -> bytes:
    """Collect the request's body; `HttpFault` 413 or 408, `ClientGone` if the client leaves meanwhile."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_long(max_bytes)
    whole = direct.take_body() if direct is not None else None
    if whole is not None:
        if len(whole) > max_bytes:
            raise _too_long(max_bytes)
        return whole
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("left")
                part: bytes = message.get("body", b"")
                size += len(part)
                if size > max_bytes:
                    raise _too_long(max_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise HttpFault(
            408,
            f"the body did not arrive within {timeout_s:g} s",
            "body_timeout",
            headers=((b"connection", b"close"),),
        ) from None


def _too_long(max_bytes: int) -> HttpFault:
    return HttpFault(
        413, f"the body is longer than {max_bytes} bytes", "body_too_large", headers=((b"connection", b"close"),)
    )
