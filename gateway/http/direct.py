"""The short way of a streamed chunk to the transport, past the server's ASGI messages: one call, no coroutine.

Offered by our protocol class in the scope, used by `gateway.http.client` for chunks of an answer that the server has
begun; whatever is unusual (a full buffer, a client that left, HTTP/1.0) goes the long way. Framing is HTTP's own.
"""

from collections.abc import Mapping
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "tandem.direct"


class DirectWriter:
    """Writes chunks of one answer."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

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


def offer_direct(scope: Any, cycle: RequestResponseCycle) -> None:
    """Put a writer for the answer of `cycle` into its scope."""
    scope.setdefault("extensions", {})[_EXTENSION] = DirectWriter(cycle)


def find_direct(scope: Mapping[str, Any]) -> DirectWriter | None:
    """Return the writer that the server offers, None if it offers none."""
    return cast("DirectWriter | None", scope.get("extensions", {}).get(_EXTENSION))
