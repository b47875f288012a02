"""Public reports about other gateways that concern APIs, text and streams, each as a test of ours (docs/gateway.md)."""

import json

import pytest

from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.chat import ChatFormat
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import Call, post
from tests.fakes.deepseek import CALL_TEXT, EOS, SERVED, WEATHER, load_chat, spell, write_directory
from tests.fakes.generator import ScriptedGenerator, fake_logprob, obedient
from tests.fakes.http_api import CHAT, COMPLETIONS, call_api
from tests.fakes.streams import CHAT_ROUTES, STREAM, body_of, read_stream, read_whole, split_events, tools_of

SAID = "Grüße 你好 👨‍👩‍👧 e\u0301"
CALLING = f"Hm 好.</think>{CALL_TEXT}"

Tiny = tuple[Tokenizer, ChatFormat]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    return load_chat(write_directory(tmp_path_factory.mktemp("tiny")))


async def ask(tiny: Tiny, text: str, route: str, payload: dict, **options) -> Call:
    script = obedient([*spell(tiny[0], text), EOS], eos=(EOS,), **options)
    return await call_api(tiny[0], ScriptedGenerator(script, models=(SERVED,)), post(route, payload), tiny[1])


@pytest.mark.parametrize("route", CHAT_ROUTES)
async def test_aisix_111_plano_980_code_router_1672_no_replacement_mark_in_any_delta(tiny: Tiny, route: str):
    """This tokenizer has one token per byte, so every character is split at every byte."""
    payload = {**body_of(route), "chat_template_kwargs": {}}
    call = await ask(tiny, f"x</think>{SAID}", route, {**payload, **STREAM}, chunk=1)
    assert read_stream(route, call.text).text == SAID
    assert all("\ufffd" not in data and "\\ufffd" not in data for _, data in split_events(call.text))


@pytest.mark.parametrize("route", CHAT_ROUTES)
async def test_vllm_48342_sglang_32167_arguments_survive_several_tokens_in_one_step(tiny: Tiny, route: str):
    told = []
    for chunk in (1, 2, 3, 5, 17, 1000):
        payload = {**body_of(route, **tools_of(route, WEATHER)), **STREAM}
        told.append(read_stream(route, (await ask(tiny, CALLING, route, payload, chunk=chunk)).text).comparable())
    assert told.count(told[0]) == len(told)
    assert told[0][2][0][0] == "get_weather"


@pytest.mark.parametrize("route", CHAT_ROUTES)
async def test_sglang_7934_a_stream_that_calls_ends_as_one(tiny: Tiny, route: str):
    for chunk in (1, 4, 1000):
        payload = {**body_of(route, **tools_of(route, WEATHER)), **STREAM}
        assert read_stream(route, (await ask(tiny, CALLING, route, payload, chunk=chunk)).text).finish == "tool_calls"


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
async def test_litellm_10686_dynamo_1856_streams_have_logprobs_and_finish_like_whole_answers(
    tiny: Tiny, thinking: str, tools: bool
):
    text = CALLING if thinking == "enabled" else CALL_TEXT
    payload = body_of(CHAT, logprobs=True, top_logprobs=1, thinking={"type": thinking})
    payload |= tools_of(CHAT, WEATHER) if tools else {}
    whole = read_whole(CHAT, (await ask(tiny, text, CHAT, payload)).json)
    stream = read_stream(CHAT, (await ask(tiny, text, CHAT, {**payload, **STREAM}, chunk=3)).text)
    assert stream.logprobs == whole.logprobs
    assert len(whole.logprobs) == whole.usage[2]
    assert stream.comparable() == whole.comparable()


@pytest.mark.parametrize("chunk", [1, 2, 1000])
async def test_sglang_11462_smg_1877_nothing_of_a_stop_string_leaks_and_the_worker_is_told(tiny: Tiny, chunk: int):
    ids = spell(tiny[0], "one two STOP three four")
    deltas = [Delta(token_ids=tuple(ids[at : at + chunk])) for at in range(0, len(ids), chunk)]
    generator = ScriptedGenerator(lambda _: [*deltas, Delta(finish=FinishReason.LENGTH)], models=(SERVED,))
    payload = body_of(CHAT, stop=[" STOP"], thinking={"type": "disabled"}, **STREAM)
    call = await call_api(tiny[0], generator, post(CHAT, payload), tiny[1])
    told = read_stream(CHAT, call.text)
    assert (told.text, told.finish) == ("one two", "stop")
    assert told.usage[2] == len("one two STOP")
    assert generator.num_aborted == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [*CHAT_ROUTES, COMPLETIONS])
async def test_sglang_33507_a_prompt_that_is_too_long_is_a_400_whether_streamed_or_not(
    tiny: Tiny, route: str, stream: bool
):
    generator = ScriptedGenerator(obedient([EOS]), models=(SERVED,))
    payload = body_of(route, text="word " * 3000, stream=stream, limit=10)
    call = await call_api(tiny[0], generator, post(route, payload), tiny[1])
    assert call.status == 400
    assert "8192" in call.json["error"]["message"]
    assert generator.prompts == []


@pytest.mark.parametrize("stream", [False, True])
async def test_sglang_31651_the_prompt_counts_once_for_several_choices(tiny: Tiny, stream: bool):
    def script(prompt):
        return [Delta(token_ids=(70,), finish=FinishReason.LENGTH, num_cached_tokens=2, logprobs=())]

    usage = []
    for n in (1, 3):
        generator = ScriptedGenerator(script, models=(SERVED,))
        payload = body_of(CHAT, n=n, **(STREAM if stream else {}))
        call = await call_api(tiny[0], generator, post(CHAT, payload), tiny[1])
        body = split_events(call.text)[-2][1] if stream else call.text.decode()
        usage.append(json.loads(body)["usage"])
    assert usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"]
    assert usage[1]["completion_tokens"] == 3 * usage[0]["completion_tokens"]


@pytest.mark.parametrize("route", CHAT_ROUTES)
@pytest.mark.parametrize("cached", [0, 1, 30])
async def test_router_193_sglang_25972_cached_tokens_are_what_was_cached_in_every_api(
    tiny: Tiny, route: str, cached: int
):
    told = read_whole(route, (await ask(tiny, "x", route, body_of(route), cached=cached)).json)
    prompt, told_cached, output = told.usage
    assert told_cached == cached <= prompt
    assert output == 2


async def test_router_161_bifrost_5764_no_field_vanishes_without_a_word(tiny: Tiny):
    payload = body_of(CHAT, top_k=3, user="me", zzz=1)
    generator = ScriptedGenerator(obedient([EOS]), models=(SERVED,))
    call = await call_api(tiny[0], generator, post(CHAT, payload), tiny[1])
    assert generator.prompts[0].sampling.top_k == 3
    assert call.response_headers[b"x-tandem-ignored-fields"] == b"zzz"


async def test_a_token_of_half_a_character_has_an_entry_of_its_own(tiny: Tiny):
    ids = spell(tiny[0], "好")
    script = lambda _: (
        [  # noqa: E731
            Delta(token_ids=(token,), logprobs=(fake_logprob(token, 0),), finish=None) for token in ids
        ]
        + [Delta(finish=FinishReason.LENGTH)]
    )
    payload = body_of(CHAT, logprobs=True, thinking={"type": "disabled"}, **STREAM)
    call = await call_api(tiny[0], ScriptedGenerator(script, models=(SERVED,)), post(CHAT, payload), tiny[1])
    told = read_stream(CHAT, call.text)
    assert (told.text, len(told.logprobs)) == ("好", 3)
