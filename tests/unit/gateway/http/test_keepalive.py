"""No comments by default; with keep-alive configured, silence is filled and the answer stays what it is."""

import asyncio

import pytest

from core.errors import NoWorker
from gateway.generation import Delta
from gateway.http.config import ApiConfig
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import post
from tests.fakes.generator import ScriptedGenerator, play
from tests.fakes.http_api import CHAT, COMPLETIONS, build_api
from tests.fakes.streams import CHAT_ROUTES, MESSAGES, STREAM, body_of, read_stream

ROUTES = [*CHAT_ROUTES, COMPLETIONS]


def sign(route: str) -> bytes:
    return b'event: ping\ndata: {"type":"ping"}\n\n' if route == MESSAGES else b": keep-alive\n\n"


async def run(tokenizer: Tokenizer, route: str, steps, until: int, *, keepalive_s: float):
    """Say the steps, holding the last ones back until so many messages went out."""
    held = asyncio.Event()
    generator = ScriptedGenerator(lambda _: steps(held))
    api, _ = build_api(generator, tokenizer, ApiConfig(keepalive_s=keepalive_s))
    call = post(route, body_of(route, **STREAM))
    task = asyncio.create_task(call.run(api))
    await call.wait_messages(until)
    held.set()
    await task
    return call


@pytest.mark.parametrize("route", ROUTES)
async def test_silence_before_and_inside_a_stream_is_filled(tokenizer: Tokenizer, route: str):
    ids = tokenizer.encode_prompt("Hello")

    def steps(held: asyncio.Event):
        return [held, *play(ids)]

    call = await run(tokenizer, route, steps, 3, keepalive_s=0.005)
    assert call.text.startswith(sign(route))
    rest = call.text.replace(sign(route), b"")
    assert read_stream(route, rest).text == "Hello"
    plain = await run(tokenizer, route, lambda _: play(ids), 1, keepalive_s=0)
    assert sign(route) not in plain.text


async def test_an_error_after_a_sign_is_told_inside_the_stream(tokenizer: Tokenizer):
    call = await run(tokenizer, CHAT, lambda held: [held, NoWorker("nobody")], 2, keepalive_s=0.005)
    assert call.status == 200
    assert b'"code":"no_worker"' in call.text
    assert b"[DONE]" not in call.text


async def test_nothing_is_sent_after_the_end(tokenizer: Tokenizer):
    first = Delta(token_ids=tokenizer.encode_prompt("H"))

    def steps(held: asyncio.Event):
        return [first, held, *play(tokenizer.encode_prompt("i"))]

    call = await run(tokenizer, CHAT, steps, 4, keepalive_s=0.002)
    assert call.is_complete
    count = len(call.messages)
    await asyncio.sleep(0.02)
    assert len(call.messages) == count
