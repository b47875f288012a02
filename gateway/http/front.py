"""Around the application, per request and not per token: keys, the access log, the server span, operators' pages."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from core.clock import Clock
from core.tracing.api import NullSpan, Span, Tracer, current_traceparent, read_traceparent
from gateway.http.client import Client, Receive, Scope, Send
from gateway.http.errors import Headers, HttpFault, error_shape
from gateway.http.gatekeeper import Gatekeeper
from gateway.http.record import RequestRecord, attach
from gateway.leases import Leases

_access = logging.getLogger("tandem.access")

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Page:
    """What an operator's page answers."""

    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


Pages = Mapping[str, Callable[[Mapping[str, str]], Page]]
"""Path -> what makes the page from the query's parameters; may raise `HttpFault`."""


class Front:
    """The outermost ASGI application."""

    def __init__(
        self,
        api: Application,
        *,
        gate: Gatekeeper,
        pages: Pages,
        clock: Clock,
        tracer: Tracer,
        leases: Leases,
        access_log: bool,
    ) -> None:
        self._api = api
        self._gate = gate
        self._pages = pages
        self._clock = clock
        self._tracer = tracer
        self._leases = leases
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        client = scope.get("client")
        record = RequestRecord(
            scope["method"], scope["path"], self._clock.now(), client=f"{client[0]}:{client[1]}" if client else ""
        )
        attach(scope, record)
        told = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        parent = read_traceparent(told.decode("latin-1")) if told else ""
        span = self._tracer.start("request", parent=parent, attributes={"http.route": record.path}, is_server=True)
        current_traceparent.set(span.traceparent)
        lease = self._leases.take("request", record.path)
        try:
            await self._serve(scope, receive, send, record)
        finally:
            self._leases.give_back(lease)
            if self._access_log or not isinstance(span, NullSpan):
                self._finish(record, span)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        try:
            record.tenant = self._gate.enter(record.path, scope["headers"])
            page = self._pages.get(record.path)
            if page is None:
                await self._api(scope, receive, send)
                return
            found = _make(page, record, scope)
        except HttpFault as fault:
            record.status, record.error = fault.status, fault.code
            body = error_shape(record.path)(fault, "")
            await Client(send).answer(fault.status, [(b"content-type", b"application/json"), *fault.headers], body)
            return
        record.status = 200
        kind: Headers = [(b"content-type", found.content_type.encode()), (b"cache-control", b"no-store")]
        await Client(send).answer(200, [*kind, *found.headers], found.body)

    def _finish(self, record: RequestRecord, span: Span) -> None:
        now = self._clock.now()
        facts: dict[str, Any] = {
            "method": record.method,
            "path": record.path[:200],
            "status": record.status or 499,
            "tenant": record.tenant,
            "request_id": record.request_id,
            "client_request_id": record.client_request_id,
            "client": record.client,
            "model": record.model,
            "stream": record.stream,
            "samples": record.samples,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "error": record.error,
        }
        if record.first_token_at is not None:
            facts["ttft_ms"] = _milliseconds(record.first_token_at - record.started_at)
        span.end(facts, error=record.error)
        if self._access_log and _access.isEnabledFor(logging.INFO):
            facts["duration_ms"] = _milliseconds(now - record.started_at)
            line = logging.LogRecord(
                _access.name, logging.INFO, "", 0, "%s %s", (record.method, record.path[:200]), None
            )
            vars(line).update((name, value) for name, value in facts.items() if value != "")
            # Past `Logger.info`, which looks for the caller in the stack first.
            _access.handle(line)


def _make(page: Callable[[Mapping[str, str]], Page], record: RequestRecord, scope: Scope) -> Page:
    if record.method not in {"GET", "HEAD"}:
        raise HttpFault(405, f"{record.path} takes GET", "method_not_allowed", headers=((b"allow", b"GET"),))
    return page(_query(scope))


def _query(scope: Scope) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in scope.get("query_string", b"").decode("latin-1").split("&") if pair)
    return {name: value for name, _, value in pairs}


def _milliseconds(seconds: float) -> float:
    return math.floor(seconds * 1e4) / 10
