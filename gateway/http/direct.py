"""The short way between the application and the server's connection, past the messages of ASGI.

Offered by our protocol class in the scope, used by `gateway.http.client`: a body that has come whole, the moment the
client leaves, head and body of an answer in one write, chunks of a stream without a coroutine. Whatever is unusual (a
full buffer, a client that left, HTTP/1.0) goes the long way. Framing is HTTP's own, heads are the server's.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "tandem.direct"


class DirectWriter:
    """The connection's side of one request and its answer."""

    __slots__ = ("_cycle", "_flow", "_left", "_watching", "_write")

    def __init__(self, cycle: RequestResponseCycle, watching: "set[DirectWriter]") -> None:
        """`watching`: those that the connection tells when it ends."""
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self._watching = watching
        self._left: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        """True if `write` may be called now: it would neither wait nor be in vain."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, body: bytes) -> None:
        """Write one chunk, which is not empty."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))

    def take_body(self) -> bytes | None:
        """Return the request's body if all of it has come; None: ask the server, piece by piece."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = cycle.body, bytearray()
        cycle.message_event.clear()
        return bytes(body)

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left` when the client goes, at once if it has gone; until `unwatch`."""
        if self._cycle.disconnected or self._cycle.transport.is_closing():
            left()
            return
        self._left = left
        self._watching.add(self)
        # A connection that is not read does not tell of its end.
        self._flow.resume_reading()

    def unwatch(self) -> None:
        """Call it no more."""
        self._left = None
        self._watching.discard(self)

    def lost(self) -> None:
        """The connection has ended."""
        if self._left is not None:
            self._left()

    @property
    def may_join(self) -> bool:
        """True if the server would send a head and a body at once: neither waits for room."""
        return not self._flow.write_paused

    def join(self) -> "Joined":
        """Return a scope in which what the server writes for this answer is held, and goes out together at its end."""
        return Joined(self._cycle)


class Joined:
    """Stands in for a connection's transport while a head and what follows it are put together."""

    __slots__ = ("_cycle", "_held", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._held: list[bytes] = []

    def __enter__(self) -> None:
        self._cycle.transport = cast("Any", self)

    def __exit__(self, *_: object) -> None:
        self._cycle.transport = self._transport
        self._flush()

    def write(self, data: bytes) -> None:
        """Hold it."""
        self._held.append(data)

    def close(self) -> None:
        """Close behind what is held."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Ask the transport."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._held:
            self._transport.write(b"".join(self._held))
            self._held.clear()


def offer_direct(scope: Any, cycle: RequestResponseCycle, watching: set[DirectWriter]) -> None:
    """Put a writer for the answer of `cycle` into its scope."""
    scope.setdefault("extensions", {})[_EXTENSION] = DirectWriter(cycle, watching)


def find_direct(scope: Mapping[str, Any]) -> DirectWriter | None:
    """Return the writer that the server offers, None if it offers none."""
    return cast("DirectWriter | None", scope.get("extensions", {}).get(_EXTENSION))
