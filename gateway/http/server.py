"""The HTTP server around the application: uvicorn with the settings that the interface relies on. Owns the socket."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn

from core.errors import ConfigError
from gateway.http.client import Receive, Scope, Send
from gateway.http.protocol import GuardedProtocol, GuardRules, guarded

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_LEAVE_POLL_S = 0.05


class HttpTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `http.tls`: empty serves plain HTTP."""

    certificate: str = ""
    """PEM file: certificate and chain."""
    key: str = ""
    """PEM file: private key."""
    client_authority: str = ""
    """PEM file: if set, clients must show a certificate of this authority."""


class _Server(uvicorn.Server):
    """Leaves signals to the process, which drains more than HTTP."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class HttpServer:
    """Serves one application on one socket in the running event loop."""

    def __init__(
        self,
        api: Application,
        host: str,
        port: int,
        *,
        guard: GuardRules | None = None,
        tls: HttpTls | None = None,
        reuse_port: bool = False,
        listener_fd: int = -1,
        hold: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`port` 0 lets the system choose; `reuse_port`: processes share the port, the system spreads connections.

        `listener_fd`: an inherited listening socket to serve on instead. The first connection is taken after `hold`.
        """
        self._api = api
        self._host = host
        self._port = port
        self._guard = guard or GuardRules()
        self._tls = tls or HttpTls()
        self._reuse_port = reuse_port
        self._listener_fd = listener_fd
        self._hold = hold
        self._context: ssl.SSLContext | None = None
        self._stamp = 0
        self._protocol: type[GuardedProtocol] = guarded(self._guard)
        self._server: _Server | None = None
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port; valid after `start`."""
        return self._port

    async def start(self) -> None:
        """Bind and serve; `ConfigError` if the address cannot be bound or a certificate not be read."""
        self._context = _open_context(self._tls)
        listener = self._listener = self._listen()
        self._port = listener.getsockname()[1]
        context = self._context
        config = uvicorn.Config(
            cast("Any", self._api),  # uvicorn's ASGI types are TypedDicts; ours are plain mappings
            http=self._protocol,
            loop="none",
            lifespan="on",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=cast("int", self._guard.keep_alive_s),  # passed on to `call_later`, a float works
            limit_concurrency=self._guard.max_connections,
            backlog=_BACKLOG,
            ssl_context_factory=None if context is None else lambda _config, _default: context,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._serve(self._server, listener))

    async def _serve(self, server: _Server, listener: socket.socket) -> None:
        with listener:
            if self._hold is not None:
                await self._hold()
            await server.serve(sockets=[listener])

    def follow_certificate(self) -> None:
        """If the certificate's files changed, use them for connections to come; wrong ones leave the old in use."""
        if self._context is None:
            return
        try:
            stamp = Path(self._tls.certificate).stat().st_mtime_ns
            if stamp != self._stamp:
                self._stamp = stamp
                self._context.load_cert_chain(self._tls.certificate, self._tls.key)
        except OSError as error:
            logger.warning("the old HTTP certificate stays in use: %s", error)

    def _listen(self) -> socket.socket:
        if self._listener_fd >= 0:
            return inherited(self._listener_fd)
        listener = bind(self._host, self._port, reuse_port=self._reuse_port)
        try:
            listener.listen(_BACKLOG)  # two sockets may be bound to one port where none of them listens
        except OSError as error:
            listener.close()
            raise _taken(self._host, self._port, error) from error
        return listener

    def hand_over(self) -> None:
        """Take no new connection, and end each one with its next answer: other processes share the socket."""
        if self._server is not None:
            self._protocol.is_leaving = True
            for server in self._server.servers if self._server.started else ():
                server.close()

    async def close_idle(self) -> None:
        """Close connections whose answers have been given; the others close after theirs.

        One that was just opened asks first: its client knows no other. It has the guard's time for that.
        """
        if self._server is None:
            return
        connections = cast("set[GuardedProtocol]", self._server.server_state.connections)
        while connections:
            for connection in list(connections):
                connection.leave()
            if all(connection.has_asked for connection in connections):
                return
            await asyncio.sleep(_LEAVE_POLL_S)

    async def drain(self, grace_s: float) -> None:
        """Stop accepting, let open answers end, cancel those still open after `grace_s`, and wait until all is closed."""
        if self._server is None or self._task is None or self._listener is None:
            return
        self._server.config.timeout_graceful_shutdown = cast("int", grace_s)  # passed on to `wait_for`, a float works
        self._server.should_exit = True
        if not self._server.started:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=not self._server.started)
        self._listener.close()  # a task that was cancelled before its first turn never came to its `with`


def _open_context(tls: HttpTls) -> ssl.SSLContext | None:
    if not tls.certificate and not tls.key:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.client_authority:
            context.load_verify_locations(tls.client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(f"http.tls: cannot use certificate, key or authority: {error}", param="http.tls") from error
    return context


def inherited(descriptor: int) -> socket.socket:
    """Return the listening socket of a descriptor that this process was given; `ConfigError` if it is none."""
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"`http.listener_fd` {descriptor} is no open socket: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    """Return a socket bound to the address, not listening yet; `ConfigError` if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, because asyncio sends small writes at once only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from error
    listener.setblocking(False)
    return listener


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another `http.port`")
