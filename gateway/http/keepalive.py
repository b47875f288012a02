"""Signs of life on a stream that has nothing to say, for proxies that cut silent connections. Off unless configured.

Each is a comment or an event that asks for nothing. The first one starts the answer, so an error after it is told inside
the stream.
"""

import asyncio
from types import TracebackType
from typing import Self

from gateway.http.client import Client
from gateway.http.errors import Headers
from gateway.http.sse import HEADERS

COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """A scope in which `sign` goes out after every `period_s` without another send; 0: never."""

    def __init__(self, client: Client, headers: Headers, sign: bytes, period_s: float) -> None:
        self._client = client
        self._headers = headers
        self._sign = sign
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._period_s > 0:
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self.stop()
            await asyncio.gather(self._task, return_exceptions=True)

    def stop(self) -> None:
        """Send no more: the end of the answer comes next."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        client = self._client
        while True:
            seen = client.num_sends
            await asyncio.sleep(self._period_s)
            if client.num_sends == seen and not client.is_sending:
                if client.is_streaming:
                    await client.interject(self._sign)
                else:
                    await client.start_stream(200, [*HEADERS, *self._headers], self._sign)
