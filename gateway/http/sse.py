"""Server-sent events: framing, and the templates that make one chunk cost one string encoding.

One `data:` line of JSON per event, a blank line after it; no comments. Chats and completions end in `[DONE]` and
name no events; the other APIs name each.
Knows no protocol's field names.
"""

import msgspec

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that would collect the answer before passing it on are asked not to.
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


_LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Characters that JSON leaves as they are, but at which some clients cut lines."""


def json_bytes(value: object) -> bytes:
    """Encode as compact JSON that no client cuts into lines."""
    data = _encoder.encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


def event(body: bytes) -> bytes:
    """Frame one JSON text as an event."""
    return b"data: " + body + b"\n\n"


def named_event(name: bytes, body: bytes) -> bytes:
    """Frame one JSON text as an event with a name, as the APIs that have several kinds of events do."""
    return b"event: " + name + b"\ndata: " + body + b"\n\n"


class TextEvent:
    """An event whose parts are fixed but for a text, a JSON value after it, and members at its end."""

    __slots__ = ("_head", "_middle", "_plain_tail", "_tail")

    def __init__(self, head: bytes, middle: bytes, tail: bytes) -> None:
        """The event reads `data: head TEXT middle VALUE tail MEMBERS }`; head, middle and tail are JSON fragments."""
        self._head = b"data: " + head
        self._middle = middle
        self._tail = tail
        self._plain_tail = middle + b"null" + tail + b"}\n\n"

    def render(self, text: str) -> bytes:
        """Return the event with `text`, the value null and no members: the path of almost every token."""
        return self._head + json_bytes(text) + self._plain_tail

    def render_with(self, text: str, value: bytes, members: bytes) -> bytes:
        """Return the event with `text`, a JSON `value`, and `members` (each with its leading comma)."""
        return b"".join((self._head, json_bytes(text), self._middle, value, self._tail, members, b"}\n\n"))
