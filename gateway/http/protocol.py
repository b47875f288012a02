"""uvicorn's httptools protocol with bounds on what a client may send and how slowly: size, count and time of headers.

Bodies are bounded by `gateway.http.client.read_body`, answers that nobody reads by `ClientWatch`.
"""

import asyncio
import fcntl
import termios
from typing import Annotated, cast

import msgspec
from msgspec import Meta
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.http.direct import DirectWriter, offer_direct


class GuardRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `http.guard`: what a connection may do before the application hears of it."""

    header_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """From the connection, or a request's first byte, to the end of its headers."""
    max_header_bytes: Annotated[int, Meta(ge=1024)] = 32 * 1024
    """Request line and headers together."""
    max_headers: Annotated[int, Meta(ge=1)] = 100
    max_connections: Annotated[int, Meta(ge=1)] = 16_384
    """Beyond it the answer is 503."""
    keep_alive_s: Annotated[float, Meta(gt=0)] = 75.0
    """Longer than the idle time of common proxies, so that they close first and no request meets a closing socket."""


def guarded(rules: GuardRules) -> "type[GuardedProtocol]":
    """Return the protocol class with these rules; uvicorn makes one instance per connection."""

    class Guarded(GuardedProtocol):
        guard = rules

    return Guarded


class _Malformed(Exception):
    """Raised inside the parser, which makes it a 400."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    guard = GuardRules()
    is_leaving = False
    """Set on the class: every connection ends with its next answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] - as uvicorn's own
        super().connection_made(transport)
        self._header_bytes = 0
        self._in_headers = True
        self._is_begun = False
        """Of the request whose headers are awaited, the first byte has come."""
        self._watching: set[DirectWriter] = set()
        self._header_timer: asyncio.TimerHandle | None = None
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_ended()
        super().connection_lost(exc)
        for answer in tuple(self._watching):
            answer.lost()

    def data_received(self, data: bytes) -> None:
        in_body = not self._in_headers and self.cycle.more_body
        super().data_received(data)
        if self._in_headers and self._is_begun:
            self._await_headers()
        if self._in_headers and not in_body:
            # The parser keeps unfinished headers to itself, so what it was given is what counts.
            self._header_bytes += len(data)
            if self._header_bytes > self.guard.max_header_bytes:
                self._refuse(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # The timer starts once this data has been looked at: mostly all headers are in it.
        self._in_headers = self._is_begun = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        self._headers_ended()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.guard.max_header_bytes or len(self.headers) > self.guard.max_headers:
            self._refuse(431, "Request Header Fields Too Large")
            raise _Malformed
        names = [name for name, _ in self.headers]
        assert self.parser is not None
        if names.count(b"host") != 1 and (b"host" in names or self.parser.get_http_version() == "1.1"):
            raise _Malformed
        if b"transfer-encoding" in names and (b"content-length" in names or not _is_chunked(self.headers)):
            # Two ways to say where a body ends: whoever stands before us may believe the other one.
            raise _Malformed
        super().on_headers_complete()
        if self.is_leaving:
            self.cycle.keep_alive = False
        offer_direct(self.scope, self.cycle, self._watching)

    @property
    def has_asked(self) -> bool:
        """True once a request's headers have come."""
        return cast("RequestResponseCycle | None", self.cycle) is not None

    def leave(self) -> None:
        """End this connection with its present answer, or now if it waits for another request and none is coming in."""
        if self.has_asked and not _unread(self.transport):
            self.shutdown()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.guard.header_timeout_s, self._headers_late)

    def _headers_ended(self) -> None:
        self._in_headers = self._is_begun = False
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        self._refuse(408, "Request Timeout")

    def _refuse(self, status: int, reason: str) -> None:
        """Answer without the application and close, unless an answer is under way."""
        if self.transport.is_closing():
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None until the first request
        if cycle is None or cycle.response_complete:
            head = f"HTTP/1.1 {status} {reason}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()


def _unread(transport: asyncio.Transport) -> bool:
    """True if bytes have come that were not read yet: closing now would reset the connection under them."""
    count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
    return any(count)


def _is_chunked(headers: list[tuple[bytes, bytes]]) -> bool:
    return [value.strip().lower() for name, value in headers if name == b"transfer-encoding"] == [b"chunked"]
