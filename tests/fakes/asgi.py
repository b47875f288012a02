"""An ASGI server in memory: one request, every message recorded; the client can leave or stop reading."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """One request and what came back."""

    path: str
    body: bytes = b""
    method: str = "POST"
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [(b"content-type", b"application/json")])
    parts: list[bytes] | None = None
    """The body in parts; a missing last part (None inside) never arrives."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it: the client leaves."""
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: sends wait, as with a client that takes nothing."""
    sent: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.reads.set()
        self._queue = list(self.parts) if self.parts is not None else [self.body]

    async def receive(self) -> dict[str, Any]:
        if self._queue:
            part = self._queue.pop(0)
            if part is not None:
                return {"type": "http.request", "body": part, "more_body": bool(self._queue)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        if not self.gone.is_set():
            self.messages.append(dict(message))
        if self.is_complete:
            # As servers do: after the last byte `receive` tells of a disconnect.
            self.gone.set()
        async with self.sent:
            self.sent.notify_all()

    async def run(self, app: Any) -> "Call":
        scope = {"type": "http", "method": self.method, "path": self.path, "headers": self.headers}
        await app(scope, self.receive, self.send)
        return self

    async def wait_messages(self, number: int) -> None:
        async with self.sent:
            await self.sent.wait_for(lambda: len(self.messages) >= number)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def response_headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def chunks(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    @property
    def text(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def is_complete(self) -> bool:
        return len(self.messages) > 1 and not self.messages[-1].get("more_body", False)


def post(path: str, payload: Any, *headers: tuple[bytes, bytes]) -> Call:
    """A JSON request."""
    return Call(path, json.dumps(payload).encode(), headers=[(b"content-type", b"application/json"), *headers])
