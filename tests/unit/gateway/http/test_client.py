"""Clients that leave, stop reading or stop early: whatever happens, no generator stays open."""

import asyncio
import json
import random

import pytest

from core.errors import ConfigError, WorkerLost
from core.request import FinishReason
from gateway.generation import Delta
from gateway.http.config import ApiConfig
from gateway.http.server import HttpServer
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import Call, post
from tests.fakes.generator import ScriptedGenerator, play
from tests.fakes.http_api import BODY, CHAT, Serve, build_api, call_api, speaker


def endless(prompt):
    while True:
        yield Delta(token_ids=(70,))
        yield 0.001


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_closes_the_generator_at_once(serve: Serve, stream: bool):
    generator = ScriptedGenerator(endless)
    async with serve(generator) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        raw = json.dumps({**BODY, "stream": stream}).encode()
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(raw), raw))
        if stream:
            await reader.readuntil(b"data: ")
        else:
            await generator.wait_open(1)
        writer.close()
        async with asyncio.timeout(30):
            await generator.aborted.wait()
    metrics = served.metrics.render().decode()
    assert generator.num_open == 0
    assert 'tandem_http_disconnects_total{cause="left"} 1.0' in metrics
    assert f'tandem_http_requests_total{{route="{CHAT}",status="499"}} 1.0' in metrics


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_client_that_leaves_before_the_first_token_closes_every_sample(tokenizer: Tokenizer, num_choices: int):
    generator = ScriptedGenerator(lambda _: [asyncio.Event()])
    call = post(CHAT, {**BODY, "n": num_choices})
    running = asyncio.create_task(call_api(tokenizer, generator, call))
    await generator.wait_open(num_choices)
    call.gone.set()
    await running
    assert (generator.num_open, generator.num_aborted) == (0, num_choices)


async def test_a_completed_stop_string_closes_the_generator_and_meters_the_surplus(tokenizer: Tokenizer):
    ids = tokenizer.encode_prompt("Hello! more")
    generator = ScriptedGenerator(lambda _: [Delta(token_ids=ids), asyncio.Event()])
    api, metrics = build_api(generator, tokenizer)
    call = await post(CHAT, {**BODY, "stop": "!"}).run(api)
    counted = len(tokenizer.encode_prompt("Hello!"))
    assert call.json["usage"]["completion_tokens"] == counted
    assert generator.num_aborted == 1
    assert f"tandem_http_surplus_tokens_total {len(ids) - counted}.0" in metrics.render().decode()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_the_end_of_an_answer_is_not_taken_for_a_client_that_left(
    tokenizer: Tokenizer, num_choices: int, stream: bool
):
    api, metrics = build_api(speaker(tokenizer), tokenizer)
    call = await post(CHAT, {**BODY, "n": num_choices, "stream": stream}).run(api)
    assert call.gone.is_set()
    assert f'tandem_http_requests_total{{route="{CHAT}",status="200"}} 1.0' in metrics.render().decode()


async def test_a_failing_sample_ends_the_others(tokenizer: Tokenizer):
    def script(prompt):
        if prompt.sampling.sample_index == 1:
            return [Delta(token_ids=(70,)), WorkerLost("gone")]
        return endless(prompt)

    generator = ScriptedGenerator(script)
    call = await call_api(tokenizer, generator, post(CHAT, {**BODY, "n": 3}))
    assert call.status == 502
    assert generator.num_open == 0


async def test_a_client_that_takes_nothing_is_cut_off_and_its_generator_closed(tokenizer: Tokenizer):
    generator = ScriptedGenerator(endless)
    api, metrics = build_api(generator, tokenizer, ApiConfig(slow_client_s=0.05))
    call = post(CHAT, {**BODY, "stream": True})
    running = asyncio.create_task(call.run(api))
    await call.wait_messages(3)
    call.reads.clear()
    await running
    assert generator.num_open == 0
    assert not call.is_complete
    assert b'tandem_http_disconnects_total{cause="slow"} 1.0' in metrics.render()


async def test_a_slow_but_reading_client_is_kept(tokenizer: Tokenizer):
    pauses = [Delta(token_ids=(70,)), 0.15, Delta(token_ids=(70,), finish=FinishReason.LENGTH)]
    call = await call_api(
        tokenizer, ScriptedGenerator(lambda _: pauses), post(CHAT, {**BODY, "stream": True}), slow_client_s=0.03
    )
    assert call.is_complete
    assert call.text.endswith(b"data: [DONE]\n\n")


async def test_clients_that_leave_at_random_moments_leave_nothing_behind(tokenizer: Tokenizer):
    dice = random.Random(5)
    generator = ScriptedGenerator(lambda prompt: [*play([70] * 3), asyncio.Event()][: dice.randint(1, 4)])
    api, metrics = build_api(generator, tokenizer)

    async def visit() -> Call:
        call = post(CHAT, {**BODY, "n": dice.randint(1, 3), "stream": dice.random() < 0.7})
        running = asyncio.create_task(call.run(api))
        for _ in range(dice.randint(0, 25)):
            await asyncio.sleep(0)
        call.gone.set()
        return await running

    before = asyncio.all_tasks()
    calls = await asyncio.gather(*(visit() for _ in range(300)))
    assert any(call.is_complete for call in calls)
    assert generator.num_aborted > 50
    assert generator.num_open == 0
    assert asyncio.all_tasks() == before
    assert b"tandem_http_open_requests 0.0" in metrics.render()


async def test_draining_finishes_open_streams_and_refuses_new_connections(serve: Serve, tokenizer: Tokenizer):
    go = asyncio.Event()
    script = lambda _: [Delta(token_ids=(70,)), go, *play([71])]
    async with serve(ScriptedGenerator(script)) as served:
        stream = await served.openai.chat.completions.create(**BODY, stream=True)
        await anext(stream)
        draining = asyncio.create_task(served.server.drain(5.0))
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            except OSError:
                break
            writer.close()
            await asyncio.sleep(0.02)
        go.set()
        rest = [chunk async for chunk in stream]
        assert rest[-1].choices[0].finish_reason == "length"
        await served.openai.close()
        await served.http.aclose()
        await draining


async def test_two_gateways_on_one_port_are_refused_in_one_sentence(serve: Serve, tokenizer: Tokenizer):
    async with serve(speaker(tokenizer)) as served:
        api, _ = build_api(speaker(tokenizer), tokenizer)
        with pytest.raises(ConfigError, match="cannot listen on"):
            await HttpServer(api, "127.0.0.1", served.port).start()
