"""The HTTP application over a scripted generator: in memory, or on a real socket with clients attached."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx
import openai
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from gateway.http.asgi import Api, build_asgi
from gateway.http.config import ApiConfig
from gateway.http.metrics import HttpMetrics
from gateway.http.server import HttpServer
from gateway.text.chat import ChatFormat
from gateway.text.template_chat import TemplateChat
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import Call
from tests.fakes.generator import ScriptedGenerator, obedient

MINTED_SEED = 7
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello there"}]
BODY = {"model": "tiny", "messages": MESSAGES}
ANSWER = "Hello world, 你好 🌍 the end"


def build_api(
    generator: ScriptedGenerator,
    tokenizer: Tokenizer,
    config: ApiConfig | None = None,
    model: str = "",
    chat_format: ChatFormat | None = None,
) -> tuple[Api, HttpMetrics]:
    """The application with fixed wall clock and seed; `model` is the only one it may serve, if set."""
    metrics = HttpMetrics(CollectorRegistry())
    api = build_asgi(
        generator,
        tokenizer,
        chat_format or TemplateChat(tokenizer),
        config or ApiConfig(),
        clock=SystemClock(),
        metrics=metrics,
        is_ready=lambda: bool(generator.served),
        unix_time=lambda: 1_700_000_000.5,
        mint_seed=lambda: MINTED_SEED,
        model=model,
    )
    return api, metrics


def speaker(tokenizer: Tokenizer, text: str = ANSWER, **options) -> ScriptedGenerator:
    """Says `text` and ends with end-of-text."""
    return ScriptedGenerator(obedient([*tokenizer.encode_prompt(text), 2], **options))


async def call_api(
    tokenizer: Tokenizer,
    generator: ScriptedGenerator,
    call: Call,
    chat_format: ChatFormat | None = None,
    **limits,
) -> Call:
    """Answer one call in memory."""
    api, _ = build_api(generator, tokenizer, ApiConfig(**limits), chat_format=chat_format)
    return await call.run(api)


@dataclass
class Served:
    """An application on a real socket."""

    generator: ScriptedGenerator
    metrics: HttpMetrics
    url: str
    port: int
    server: HttpServer
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Served]]


@contextlib.asynccontextmanager
async def serve_api(
    generator: ScriptedGenerator,
    tokenizer: Tokenizer,
    config: ApiConfig | None = None,
    chat_format: ChatFormat | None = None,
) -> AsyncIterator[Served]:
    """Serve on a free port until the block ends."""
    api, metrics = build_api(generator, tokenizer, config, chat_format=chat_format)
    server = HttpServer(api, "127.0.0.1", 0)
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client,
        ):
            yield Served(generator, metrics, url, server.port, server, http, client)
    finally:
        await server.drain(2.0)
