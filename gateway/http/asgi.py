"""The HTTP interface as a bare ASGI application: routes, error mapping, accounting of each request.

Built by `build_asgi`; the composition root gives it the cluster (`Generator`), the tokenizer and the clocks.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from core.clock import Clock
from core.log import log_context
from core.metrics import CONTENT_TYPE
from gateway.generation import Generator, ServedModel
from gateway.http.client import Client, ClientGone, ClientWatch, Receive, Scope, Send, read_body
from gateway.http.config import ApiConfig
from gateway.http.dialects import Dialect, Dialects
from gateway.http.direct import DirectWriter, find_direct
from gateway.http.errors import Headers, HttpFault, describe, error_shape
from gateway.http.exchange import Exchange
from gateway.http.gatekeeper import Gatekeeper
from gateway.http.headers import RequestHints, ignored_fields, read_hints
from gateway.http.intake import Accepted, Intake
from gateway.http.metrics import HttpMetrics
from gateway.http.record import RequestRecord, record_of
from gateway.http.schema import BodyType, decode_body
from gateway.http.sse import json_bytes
from gateway.http.texts import TextRoute, TextRoutes
from gateway.rate_limit import RateLimits
from gateway.tenants import Tenants
from gateway.text.chat import ChatFormat
from gateway.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_JSON = (b"content-type", b"application/json")
_ONE_MODEL = "/v1/models/"
_TEXT = (b"content-type", b"text/plain; charset=utf-8")

Handler = Callable[[Scope, Receive, Client], Awaitable[None]]


class Api:
    """One ASGI application; lives in one event loop."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        config: ApiConfig,
        *,
        clock: Clock,
        metrics: HttpMetrics,
        is_ready: Callable[[], bool],
        unix_time: Callable[[], float],
        mint_seed: Callable[[], int],
        model: str,
        gate: Gatekeeper,
    ) -> None:
        self._generator = generator
        self._gate = gate
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._is_ready = is_ready
        self._intake = Intake(
            tokenizer,
            chat_format,
            config,
            models=generator.models,
            only=model,
            mint_seed=mint_seed,
            tell_verdict=lambda verdict: metrics.structured.labels(verdict).inc(),
        )
        dialects = Dialects(self._intake, tokenizer.vocabulary, unix_time)
        self._routes: dict[str, dict[str, Handler]] = {
            **{dialect.route: {"POST": self._generation(dialect)} for dialect in dialects.all()},
            **{path: {"POST": self._unary(route)} for path, route in TextRoutes(self._intake, tokenizer).all().items()},
            "/v1/models": {"GET": self._models, "HEAD": self._models},
            "/health": {"GET": self._alive, "HEAD": self._alive},
            "/livez": {"GET": self._alive, "HEAD": self._alive},
            "/readyz": {"GET": self._ready, "HEAD": self._ready},
            "/metrics": {"GET": self._render_metrics, "HEAD": self._render_metrics},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            await self._serve(scope, receive, Client(send, find_direct(scope)))
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                self._intake.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _serve(self, scope: Scope, receive: Receive, client: Client) -> None:
        path: str = scope["path"]
        route = path if path in self._routes else "other"
        status: int | None = None
        try:
            await self._find(path, scope["method"])(scope, receive, client)
        except ClientGone as gone:
            self._metrics.disconnects.labels(gone.cause).inc()
            status = gone.http_status
        except Exception as error:  # noqa: BLE001  (the top of a request: everything becomes an answer)
            fault = describe(error)
            status = fault.status
            if status == 500:
                with log_context(request_id=client.request_id):
                    _log.exception("request to %s failed", route)
            if not client.status:
                echoed = _request_id(scope) or client.request_id
                named = [(b"x-request-id", echoed.encode())] if echoed else []
                await client.answer(status, [_JSON, *fault.headers, *named], error_shape(path)(fault, echoed))
            record_of(scope).error = fault.code
        finally:
            record_of(scope).status = status or client.status or 499
            self._metrics.requests.labels(route, str(status or client.status or 499)).inc()

    def _find(self, path: str, method: str) -> Handler:
        methods = self._routes.get(path)
        if methods is None and path.startswith(_ONE_MODEL):
            methods = {"GET": self._model, "HEAD": self._model}
        if methods is None:
            raise HttpFault(404, f"there is no route {path[:200]}", "unknown_route")
        if method not in methods:
            allowed = ", ".join(methods)
            raise HttpFault(
                405,
                f"{path} takes {allowed}, not {method[:20]}",
                "method_not_allowed",
                headers=((b"allow", allowed.encode()),),
            )
        return methods[method]

    async def _alive(self, _scope: Scope, _receive: Receive, client: Client) -> None:
        await client.answer(200, [_TEXT], b"ok\n")

    async def _ready(self, _scope: Scope, _receive: Receive, client: Client) -> None:
        ready = self._is_ready()
        await client.answer(200 if ready else 503, [_TEXT], b"ready\n" if ready else b"not ready\n")

    async def _render_metrics(self, _scope: Scope, _receive: Receive, client: Client) -> None:
        await client.answer(200, [(b"content-type", CONTENT_TYPE.encode())], self._metrics.render())

    async def _models(self, _scope: Scope, _receive: Receive, client: Client) -> None:
        data = [_told(model) for model in self._generator.models()]
        await client.answer(200, [_JSON], json_bytes({"object": "list", "data": data}))

    async def _model(self, scope: Scope, _receive: Receive, client: Client) -> None:
        name: str = scope["path"].removeprefix(_ONE_MODEL)
        await client.answer(200, [_JSON], json_bytes(_told(self._intake.find(name))))

    def _unary(self, route: TextRoute) -> Handler:
        async def handle(scope: Scope, receive: Receive, client: Client) -> None:
            _hints, raw = await self._read(scope, receive, client.direct)
            await client.answer(200, [_JSON], await route(raw))

        return handle

    def _generation(self, dialect: Dialect[Any]) -> Handler:
        async def handle(scope: Scope, receive: Receive, client: Client) -> None:
            await self._answer(scope, receive, client, dialect)

        return handle

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        client: Client,
        dialect: Dialect[BodyType],
    ) -> None:
        """Read, check, generate, answer: the life of a generation request on any route."""
        started_at = self._clock.now()
        hints, raw = await self._read(scope, receive, client.direct)
        decoded = decode_body(raw, dialect.kind)
        async with ClientWatch(client, receive, self._config.slow_client_s):
            accepted = await dialect.accept(decoded.body, hints)
            client.request_id = accepted.request_id
            for sample in accepted.samples:
                if sample.prompt.timeline is not None:
                    sample.prompt.timeline.arrived = started_at
                    sample.prompt.timeline.tokenized = self._clock.now()
            record = record_of(scope)
            _note(record, accepted, hints)
            headers = self._answer_headers(hints, accepted, (*decoded.ignored, *accepted.ignored))
            headers += self._gate.admit(record.tenant, accepted.num_prompt_tokens)
            exchange = Exchange(
                accepted,
                dialect.form(accepted, decoded.body),
                client,
                self._clock,
                headers,
                keepalive_s=self._config.keepalive_s,
            )
            try:
                await self._generate(exchange, dialect.route, started_at, stream=accepted.stream)
            finally:
                record.first_token_at = exchange.first_delta_at
                record.cached_tokens = exchange.usage.cached_tokens
                record.completion_tokens = exchange.usage.completion_tokens
                self._gate.spend(record.tenant, exchange.usage.completion_tokens)

    async def _read(self, scope: Scope, receive: Receive, direct: DirectWriter | None) -> tuple[RequestHints, bytes]:
        for name, value in scope["headers"]:
            if name == b"content-type" and b"json" not in value.lower():
                raise HttpFault(415, "send the body with content-type: application/json", "unsupported_media_type")
        hints = read_hints(scope["headers"], self._config.request_timeout_s, record_of(scope).tenant)
        limit, timeout_s = self._config.max_body_bytes, self._config.body_timeout_s
        return hints, await read_body(scope, receive, max_bytes=limit, timeout_s=timeout_s, direct=direct)

    def _answer_headers(self, hints: RequestHints, accepted: Accepted, ignored: tuple[str, ...]) -> Headers:
        headers: Headers = [(b"x-request-id", (hints.request_id or accepted.request_id).encode())]
        if ignored:
            self._metrics.ignored_fields.inc(len(ignored))
            headers.append((b"x-tandem-ignored-fields", ignored_fields(ignored)))
        return headers

    async def _generate(self, exchange: Exchange, route: str, started_at: float, *, stream: bool) -> None:
        metrics = self._metrics
        metrics.open_requests.inc()
        try:
            generator = self._generator
            work = exchange.answer_stream(generator) if stream else exchange.answer_whole(generator, started_at)
            await work
        finally:
            metrics.open_requests.dec()
            metrics.duration.labels(route).observe(self._clock.now() - started_at)
            if exchange.first_delta_at is not None:
                metrics.first_token.labels(route).observe(exchange.first_delta_at - started_at)
                metrics.prompt_tokens.inc(exchange.usage.prompt_tokens)
            for counter, amount in (
                (metrics.cached_tokens, exchange.usage.cached_tokens),
                (metrics.completion_tokens, exchange.usage.completion_tokens),
                (metrics.surplus_tokens, exchange.num_surplus),
            ):
                if amount:
                    counter.inc(amount)


def build_asgi(
    generator: Generator,
    tokenizer: Tokenizer,
    chat_format: ChatFormat,
    config: ApiConfig,
    *,
    clock: Clock,
    metrics: HttpMetrics,
    is_ready: Callable[[], bool],
    unix_time: Callable[[], float],
    mint_seed: Callable[[], int] | None = None,
    model: str = "",
    gate: Gatekeeper | None = None,
) -> Api:
    """Build the application. `model` names the only model that workers may serve, if that is known beforehand.

    `is_ready` answers /readyz; `unix_time` (wall clock) fills the field `created` only; `mint_seed` returns 64 random
    bits for requests that bring no seed (the system's randomness unless given).
    """
    return Api(
        generator,
        tokenizer,
        chat_format,
        config,
        clock=clock,
        metrics=metrics,
        is_ready=is_ready,
        unix_time=unix_time,
        mint_seed=mint_seed or (lambda: secrets.randbits(64)),
        model=model,
        gate=gate or Gatekeeper(Tenants(""), RateLimits(clock)),
    )


def _note(record: RequestRecord, accepted: Accepted, hints: RequestHints) -> None:
    record.request_id = accepted.request_id
    record.client_request_id = hints.request_id or ""
    record.model = accepted.model
    record.stream = accepted.stream
    record.samples = len(accepted.samples)
    record.prompt_tokens = accepted.num_prompt_tokens


def _told(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "tandem",
        "max_model_len": model.max_tokens_total,
    }


def _request_id(scope: Scope) -> str:
    """Return the client's own name for the request, if it is well-formed."""
    return read_hints([pair for pair in scope["headers"] if pair[0] == b"x-request-id"], 0.0).request_id or ""
