"""Control links within one process: a dialer that knows sources by address, over bounded queues instead of a network.

For a worker that is its own peer, for simulations and for tests. Behaves like the remote one: messages in order, an error
of the source closes the link with it, either side may hang up at any time.
"""

import asyncio

from core.errors import TandemError, WorkerLost
from core.handover import FromD, FromP
from kv_transfer.api import ControlLink
from kv_transfer.source import Source
from kv_transfer.source_link import SourceLink

_CAPACITY = 65536


class LocalLink:
    """D's end. `cut` breaks it as a lost connection does."""

    def __init__(self, source: Source) -> None:
        self._to_d: asyncio.Queue[FromP | None] = asyncio.Queue(_CAPACITY)
        self._error: TandemError | None = None
        self._closed = False
        self._far: SourceLink = source.open_link(self._to_d.put_nowait)

    async def send(self, message: FromD) -> None:
        if self._closed:
            raise WorkerLost("the link is closed")
        try:
            await self._far.handle(message)
        except TandemError as error:
            self.cut(error)

    async def receive(self) -> FromP:
        message = await self._to_d.get()
        if message is None:
            self._to_d.put_nowait(None)
            raise self._error or WorkerLost("the link is closed")
        return message

    async def close(self) -> None:
        self.cut(None)

    def cut(self, error: TandemError | None) -> None:
        """End the link for both sides; messages on their way to D still arrive. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._error = error
        self._far.closed()
        self._to_d.put_nowait(None)


class LocalDialer:
    """Finds sources of this process by address."""

    def __init__(self) -> None:
        self.links: list[LocalLink] = []
        self._sources: dict[str, Source] = {}

    def serve(self, address: str, source: Source) -> None:
        """Make a source reachable; a later one at the same address takes its place."""
        self._sources[address] = source

    def withdraw(self, address: str) -> None:
        """Nobody answers at this address any more."""
        self._sources.pop(address, None)

    async def dial(self, address: str, timeout_s: float) -> ControlLink:  # noqa: ARG002 - nothing here can wait
        source = self._sources.get(address)
        if source is None:
            raise WorkerLost(f"nobody answers at {address}")
        link = LocalLink(source)
        self.links.append(link)
        return link
