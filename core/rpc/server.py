"""The gRPC server of one process: secret check before anything is read, errors to status, clear bind errors.

Services are added as tables of methods by the adapters beside this file; this one knows none of them.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar, cast

import grpc
from grpc import aio

from core.errors import ConfigError, TandemError, WorkerLost
from core.rpc.channel import KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES
from core.rpc.credentials import server_credentials
from core.rpc.health import Health
from core.rpc.proof import Proof
from core.rpc.status import refuse

logger = logging.getLogger(__name__)

SERVER_OPTIONS: Mapping[str, int] = {
    **KEEPALIVE_OPTIONS,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    # Two processes on one port would each see half of the calls; a taken port must fail.
    "grpc.so_reuseport": 0,
    "grpc.http2.min_ping_interval_without_data_ms": 500,
    "grpc.http2.max_ping_strikes": 0,
}

Request = TypeVar("Request", bound="Wire")
Reply = TypeVar("Reply", bound="Wire")


class Wire(Protocol):
    """What a protobuf message can do, as far as this file cares."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return the wire form."""
        ...


Context = aio.ServicerContext[Any, Any]
StreamBody = Callable[[AsyncIterator[Request], aio.ServicerContext[Request, Reply]], Awaitable[None]]
UnaryBody = Callable[[Request], Awaitable[Reply]]


class RpcServer:
    """One listening gRPC server. Add services, `start`, and `stop` once; asyncio thread only."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof
        self._server = aio.server(options=list(SERVER_OPTIONS.items()))
        self.health = Health(self._server)
        self._stopping = False
        self.port = 0
        """The bound port, after `start`."""

    def add_stream(
        self, service: str, method: str, body: StreamBody[Request, Reply], parse: Callable[[bytes], Request]
    ) -> None:
        """Serve one bidirectional method. `body` writes through its context; its errors become the status."""

        async def run(requests: AsyncIterator[Request], context: aio.ServicerContext[Request, Reply]) -> None:
            await self._check(context)
            try:
                await body(requests, context)
            except Exception as error:  # noqa: BLE001 - top of a call: logged and answered by `_answer`
                self._raise_if_stopped(error)
                await _answer(f"{service}/{method}", context, error)

        handler = grpc.stream_stream_rpc_method_handler(run, parse, _serialize)
        self._add(service, method, handler)

    def add_unary(
        self, service: str, method: str, body: UnaryBody[Request, Reply], parse: Callable[[bytes], Request]
    ) -> None:
        """Serve one unary method."""

        async def run(request: Request, context: aio.ServicerContext[Request, Reply]) -> Reply:
            await self._check(context)
            try:
                return await body(request)
            except Exception as error:  # noqa: BLE001 - top of a call: logged and answered by `_answer`
                self._raise_if_stopped(error)
                await _answer(f"{service}/{method}", context, error)

        handler = grpc.unary_unary_rpc_method_handler(run, parse, _serialize)
        self._add(service, method, handler)

    def _raise_if_stopped(self, error: Exception) -> None:
        """End a call whose body met the end of this server: gRPC's word for it is no crash of ours."""
        if self._stopping and isinstance(error, aio.BaseError) and not isinstance(error, aio.AbortError):
            raise asyncio.CancelledError from error

    def _add(self, service: str, method: str, handler: "grpc.RpcMethodHandler[Any, Any]") -> None:
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))

    async def _check(self, context: Context) -> None:
        try:
            self._proof.verify(tuple(context.invocation_metadata() or ()))
        except ConfigError as error:
            logger.warning("refused a call from %s: %s", context.peer(), error.message)
            await refuse(context, error, grpc.StatusCode.UNAUTHENTICATED)

    async def start(self, host: str, port: int) -> int:
        """Bind and serve; returns the bound port (port 0 asks the system for one). Raises `ConfigError`."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # Asked first, because gRPC's core writes lines of its own to stderr when it cannot bind.
        reason = bind_failure(host, port)
        if reason:
            raise ConfigError(f"cannot listen for gRPC on {address}: {reason}")
        try:
            tls = self._proof.tls
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, server_credentials(tls))
        except RuntimeError as error:
            reason = bind_failure(host, port) or "the address could not be bound"
            raise ConfigError(f"cannot listen for gRPC on {address}: {reason}") from error
        await self._server.start()
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them; idempotent."""
        self._stopping = True
        await self._server.stop(grace_s)


async def write(context: aio.ServicerContext[Any, Reply], message: Reply) -> None:
    """Write to the caller; returns when flow control took it. Raises `WorkerLost` if the caller is gone."""
    try:
        await context.write(message)
    except (aio.UsageError, aio.InternalError, asyncio.InvalidStateError) as error:
        # Not named by context.peer(): that crashes the interpreter (grpcio 1.85) once the call is over.
        raise WorkerLost("the caller is gone") from error


def _serialize(message: Wire) -> bytes:
    return message.SerializeToString()


async def _answer(method: str, context: Context, error: Exception) -> NoReturn:
    if isinstance(error, aio.AbortError):
        raise error
    told = _told(error)
    if told is None:
        logger.error("%s crashed", method, exc_info=error)
        told = TandemError(f"{method} failed: {type(error).__name__}: {error}")
    try:
        await refuse(context, told)
    except (aio.UsageError, aio.InternalError) as unheard:
        # The caller is gone: nobody is left to be told. gRPC logs any other exception as a crash of ours.
        raise asyncio.CancelledError from unheard


def _told(error: BaseException) -> TandemError | None:
    """Return the error to tell: itself, or the first of a task group in which nothing else failed."""
    if isinstance(error, TandemError):
        return error
    if isinstance(error, BaseExceptionGroup):
        leaves = [_told(leaf) for leaf in cast("BaseExceptionGroup[BaseException]", error).exceptions]
        return leaves[0] if all(leaves) else None
    return None


def bind_failure(host: str, port: int) -> str:
    """Say in plain words why a socket cannot be bound here; empty if it can. A name is left to who resolves it."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except socket.gaierror:
        return ""
    except OSError as error:
        return f"{(error.strerror or str(error)).lower()}; choose another port or stop the process that holds it"
    return ""
