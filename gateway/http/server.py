"""The HTTP server around the application: uvicorn with the settings that the interface relies on. Owns the socket."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import Any, cast

import uvicorn

from core.errors import ConfigError
from gateway.http.client import Receive, Scope, Send

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than the idle time of common proxies, so that they close first and no request meets a closing socket."""


class _Server(uvicorn.Server):
    """Leaves signals to the process, which drains more than HTTP."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class HttpServer:
    """Serves one application on one socket in the running event loop."""

    def __init__(self, api: Application, host: str, port: int) -> None:
        """`port` 0 lets the system choose."""
        self._api = api
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port; valid after `start`."""
        return self._port

    async def start(self) -> None:
        """Bind and serve; `ConfigError` if the address cannot be bound."""
        listener = _bind(self._host, self._port)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            cast("Any", self._api),  # uvicorn's ASGI types are TypedDicts; ours are plain mappings
            loop="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def drain(self, grace_s: float) -> None:
        """Stop accepting, let open answers end, cancel those still open after `grace_s`, and wait until all is closed."""
        if self._server is None or self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = cast("int", grace_s)  # passed on to `wait_for`, a float works
        self._server.should_exit = True
        await self._task


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another `http.port`") from error
    listener.setblocking(False)
    return listener
