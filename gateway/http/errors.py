"""Errors as clients see them: OpenAI's error object, the status and the headers that belong to it."""

import math

from core.errors import NoCapacity, TandemError
from gateway.http.sse import json_bytes

Headers = list[tuple[bytes, bytes]]


class HttpFault(Exception):
    """A request that fails before any part of the cluster is asked: wrong method, body too long and the like."""

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


def error_object(message: str, *, status: int, code: str, param: str | None = None) -> bytes:
    """Return `{"error": ...}` as JSON."""
    fallback = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else fallback
    return json_bytes({"error": {"message": message, "type": kind, "param": param, "code": code}})


def describe(error: Exception) -> tuple[int, Headers, bytes]:
    """Return (status, extra headers, body) for any error; what is not ours says nothing of its inside."""
    if isinstance(error, HttpFault):
        body = error_object(error.message, status=error.status, code=error.code, param=error.param)
        return error.status, list(error.headers), body
    if not isinstance(error, TandemError):
        return 500, [], error_object("internal error of the gateway", status=500, code="internal")
    status = error.http_status
    headers: Headers = []
    retry_after = error.retry_after_s
    if retry_after is None and (isinstance(error, NoCapacity) or status == 503):
        retry_after = 1.0
    if retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(retry_after))).encode()))
    return status, headers, error_object(error.message, status=status, code=error.code, param=error.param)
