"""Errors across gRPC: a `TandemError` travels as a status plus its stable code in trailing metadata, both ways.

An answer without our code (a dead peer, a foreign server) is mapped by its gRPC status.
"""

from typing import NoReturn

import grpc
from grpc import aio

from core.errors import ConfigError, DeadlineExceeded, NamespaceMismatch, TandemError, WorkerLost, from_code

CODE_KEY = "tandem-code"
PARAM_KEY = "tandem-param-bin"
RETRY_KEY = "tandem-retry-after"
MAX_MESSAGE_CHARS = 2000
"""Status and metadata share one header block, which gRPC bounds."""

Context = aio.ServicerContext[object, object]


async def refuse(context: Context, error: TandemError, status: grpc.StatusCode | None = None) -> NoReturn:
    """End the call with this error; `status` overrides the one of the error tree. Raises always."""
    trailing: list[tuple[str, str | bytes]] = [(CODE_KEY, error.code)]
    if error.param is not None:
        trailing.append((PARAM_KEY, error.param.encode()[:200]))
    if error.retry_after_s is not None:
        trailing.append((RETRY_KEY, repr(error.retry_after_s)))
    await context.abort(
        status or grpc.StatusCode[error.grpc_status], error.message[:MAX_MESSAGE_CHARS], tuple(trailing)
    )


def from_status(error: aio.AioRpcError, peer: str) -> TandemError:
    """Rebuild the error that the peer raised; `peer` names it in messages about lost connections."""
    return rebuild(error.code(), error.details() or "", dict(error.trailing_metadata() or ()), peer)


def rebuild(status: grpc.StatusCode, details: str, trailing: dict[str, str | bytes], peer: str) -> TandemError:
    """Map a status with its details and trailing metadata; total over every status."""
    code = trailing.get(CODE_KEY)
    if isinstance(code, str):
        param, retry = trailing.get(PARAM_KEY), trailing.get(RETRY_KEY)
        return from_code(
            code,
            details,
            param=param.decode(errors="replace") if isinstance(param, bytes) else None,
            retry_after_s=_seconds(retry) if isinstance(retry, str) else None,
        )
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not answer in time")
    if status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ConfigError(f"{peer} refused this process: {details}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return NamespaceMismatch(f"{peer} does not serve this call: {details}")
    return WorkerLost(f"the connection to {peer} is lost: {details or status.name.lower()}")


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
