"""Errors as clients see them: status, headers and the error object in the shape of each API."""

import math
from collections.abc import Callable

from core.errors import NoCapacity, TandemError
from gateway.http.sse import json_bytes

Headers = list[tuple[bytes, bytes]]


class HttpFault(Exception):
    """What a client is told instead of an answer; raised as it is where no part of the cluster was asked yet."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers


ErrorShape = Callable[[HttpFault, str], bytes]
"""Writes the body of an error; takes the request's id, empty if it has none."""


def describe(error: Exception) -> HttpFault:
    """Return what the client is told of any error; what is not ours says nothing of its inside."""
    if isinstance(error, HttpFault):
        return error
    if not isinstance(error, TandemError):
        return HttpFault(500, "internal error of the gateway", "internal")
    status = error.http_status
    headers: Headers = []
    retry_after = error.retry_after_s
    if retry_after is None and (isinstance(error, NoCapacity) or status == 503):
        retry_after = 1.0
    if retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(retry_after))).encode()))
    return HttpFault(status, error.message, error.code, param=error.param, headers=tuple(headers))


def openai_error(fault: HttpFault, _request_id: str = "") -> bytes:
    """Return OpenAI's body: ``{"error": {message, type, param, code}}``."""
    fallback = "invalid_request_error" if fault.status < 500 else "server_error"
    kind = "rate_limit_error" if fault.status == 429 else fallback
    return json_bytes({"error": {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code}})


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(fault: HttpFault, request_id: str = "") -> bytes:
    """Return Anthropic's body: ``{"type": "error", "error": {type, message}, "request_id"}``."""
    fallback = "invalid_request_error" if fault.status < 500 else "api_error"
    error = {"type": _ANTHROPIC_KINDS.get(fault.status, fallback), "message": fault.message}
    return json_bytes({"type": "error", "error": error, "request_id": request_id or None})


def error_shape(path: str) -> ErrorShape:
    """Return the shape that clients of a path read."""
    return anthropic_error if path.startswith("/v1/messages") else openai_error
