import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from gateway.http.asgi import Api, build_asgi
from gateway.http.config import ApiConfig
from gateway.http.metrics import HttpMetrics
from gateway.http.server import HttpServer
from gateway.text.tokenizer import Tokenizer
from tests.fakes.generator import ScriptedGenerator
from tests.fakes.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


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


def build(generator: ScriptedGenerator, tokenizer: Tokenizer, config: ApiConfig) -> tuple[Api, HttpMetrics]:
    metrics = HttpMetrics(CollectorRegistry())
    api = build_asgi(
        generator,
        tokenizer,
        config,
        clock=SystemClock(),
        metrics=metrics,
        is_ready=lambda: bool(generator.served),
        unix_time=lambda: 1_700_000_000.5,
        mint_seed=lambda: 7,
    )
    return api, metrics


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Serve:
    """Serves a scripted generator over uvicorn on a free port."""

    @contextlib.asynccontextmanager
    async def start(generator: ScriptedGenerator, config: ApiConfig | None = None) -> AsyncIterator[Served]:
        api, metrics = build(generator, tokenizer, config or ApiConfig())
        server = HttpServer(api, "127.0.0.1", 0)
        await server.start()
        url = f"http://127.0.0.1:{server.port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client,
        ):
            yield Served(generator, metrics, url, server.port, server, http, client)
        await server.drain(2.0)

    return start
