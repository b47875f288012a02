"""The same questions through all APIs: streams add up, usage agrees, errors come in each API's own shape."""

import json
from itertools import pairwise

import pytest

from core.errors import NoCapacity, WorkerLost
from gateway.generation import Delta
from gateway.text.chat import ChatFormat
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import Call, post
from tests.fakes.deepseek import ARGUMENTS, CALL_TEXT, EOS, SERVED, WEATHER, load_chat, spell, write_directory
from tests.fakes.generator import ScriptedGenerator, obedient
from tests.fakes.http_api import CHAT, COMPLETIONS, call_api
from tests.fakes.streams import (
    CHAT_ROUTES,
    MESSAGES,
    RESPONSES,
    STREAM,
    body_of,
    read_stream,
    read_whole,
    split_events,
    stops_of,
    tools_of,
)

THOUGHT, SAID = "Let me think 🤔.", "Hello, 你好 🌍 the end"
ANSWER = f"{THOUGHT}\n</think>\n\n{SAID}"
CALLING = f"{THOUGHT}</think>I look it up.\n\n{CALL_TEXT}"
TEXTS = {"answer": ANSWER, "call": CALLING, "thoughts": "Only thoughts", "nothing": ""}

Tiny = tuple[Tokenizer, ChatFormat]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    return load_chat(write_directory(tmp_path_factory.mktemp("tiny")))


async def ask(tiny: Tiny, text: str, route: str, payload: dict, **options) -> Call:
    script = obedient([*spell(tiny[0], text), EOS], eos=(EOS,), **options)
    return await call_api(tiny[0], ScriptedGenerator(script, models=(SERVED,)), post(route, payload), tiny[1])


VARIANTS = {
    "plain": lambda _: {},
    "tools": lambda route: tools_of(route, WEATHER),
    "stop": lambda route: stops_of(route, ["look", "好"]),
    "short": lambda _: {"limit": 9},
    "cut in the call": lambda route: {"limit": 150, **tools_of(route, WEATHER)},
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("variant", VARIANTS)
async def test_streams_and_whole_answers_of_all_apis_tell_the_same(tiny: Tiny, variant: str, text: str):
    told = {}
    for route in CHAT_ROUTES:
        payload = body_of(route, **VARIANTS[variant](route))
        whole = await ask(tiny, TEXTS[text], route, payload, cached=2)
        assert whole.status == 200, whole.text
        told[route, "whole"] = read_whole(route, whole.json).comparable()
        for chunk in (1, 7):
            call = await ask(tiny, TEXTS[text], route, {**payload, **STREAM}, chunk=chunk, cached=2)
            told[route, chunk] = read_stream(route, call.text).comparable()
    for (one, first), (other, second) in pairwise(told.items()):
        assert first == second, (one, other)


async def test_a_message_names_the_stop_sequence_that_ended_it(tiny: Tiny):
    payload = body_of(MESSAGES, stop_sequences=["zzz", "好"], thinking={"type": "disabled"})
    whole = (await ask(tiny, SAID, MESSAGES, payload)).json
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "好")
    assert whole["content"] == [{"type": "text", "text": "Hello, 你"}]
    stream = split_events((await ask(tiny, SAID, MESSAGES, {**payload, "stream": True})).text)
    assert json.loads(stream[-2][1])["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "好"}


async def test_a_message_has_thinking_text_and_tool_blocks_in_order(tiny: Tiny):
    whole = (await ask(tiny, CALLING, MESSAGES, body_of(MESSAGES, **tools_of(MESSAGES, WEATHER)))).json
    thinking, text, call = whole["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", THOUGHT, "I look it up.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", ARGUMENTS)
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_a_response_has_reasoning_message_and_call_items_in_order(tiny: Tiny):
    whole = (await ask(tiny, CALLING, RESPONSES, body_of(RESPONSES, **tools_of(RESPONSES, WEATHER)))).json
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message["content"][0]["text"] == "I look it up."
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", ARGUMENTS)
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)


async def test_a_cut_response_says_why_it_is_incomplete(tiny: Tiny):
    whole = (await ask(tiny, ANSWER, RESPONSES, body_of(RESPONSES, limit=5))).json
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_log_probabilities_of_a_response_are_those_of_its_text(tiny: Tiny):
    payload = body_of(RESPONSES, include=["message.output_text.logprobs"], top_logprobs=2)
    whole = (await ask(tiny, ANSWER, RESPONSES, payload)).json
    entries = whole["output"][1]["content"][0]["logprobs"]
    assert len(entries[0]["top_logprobs"]) == 2
    stream = split_events((await ask(tiny, ANSWER, RESPONSES, {**payload, "stream": True}, chunk=3)).text)
    deltas = [json.loads(data) for name, data in stream if name == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == entries


@pytest.mark.parametrize("route", [*CHAT_ROUTES, COMPLETIONS])
async def test_a_failure_inside_a_stream_ends_it_in_the_words_of_its_api(tiny: Tiny, route: str):
    """Reports preloop 117, talon 254 and 393: a stream that just stops, or an error glued to half an event."""
    first = Delta(token_ids=tuple(spell(tiny[0], "Hm")))
    generator = ScriptedGenerator(lambda _: [first, WorkerLost("decode-1 is gone")], models=(SERVED,))
    call = await call_api(tiny[0], generator, post(route, body_of(route, stream=True)), tiny[1])
    assert call.status == 200
    assert call.is_complete
    *_, (name, data) = split_events(call.text)
    ended = json.loads(data)
    if route == MESSAGES:
        assert name == "error"
        assert ended["error"] == {"type": "api_error", "message": "decode-1 is gone"}
    elif route == RESPONSES:
        assert name == "response.failed"
        assert ended["response"]["status"] == "failed"
        assert ended["response"]["error"] == {"code": "server_error", "message": "decode-1 is gone"}
    else:
        assert ended["error"]["code"] == "worker_lost"
    for end in (b"[DONE]", b"message_stop", b"response.completed"):
        assert end not in call.text


async def test_errors_before_the_first_byte_have_the_shape_of_their_api(tiny: Tiny):
    for route in CHAT_ROUTES:
        generator = ScriptedGenerator(lambda _: [NoCapacity("busy", retry_after_s=3)], models=(SERVED,))
        call = await call_api(tiny[0], generator, post(route, body_of(route)), tiny[1])
        assert (call.status, call.response_headers[b"retry-after"]) == (429, b"3")
        told = call.json
        assert told["error"]["type"] == "rate_limit_error"
        assert (told.get("type") == "error") == (route == MESSAGES)
        assert call.response_headers[b"x-request-id"]


REFUSED = [
    (RESPONSES, {"store": True}, "store"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
    (RESPONSES, {"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
    (MESSAGES, {"output_config": {"format": {"type": "poem"}}}, "output_config.format"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
    (RESPONSES, {"input": [{"content": "x"}]}, "input[0]"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"n": 2}, "n"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"max_output_tokens": 100_000}, "max_output_tokens"),
    (RESPONSES, {"top_logprobs": 21}, "top_logprobs"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"max_tokens": "many"}, "max_tokens"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (MESSAGES, {"thinking": {"type": "maybe"}}, "thinking.type"),
    (MESSAGES, {"n": 3}, "n"),
    (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "fields", "named"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_cannot_be_done_is_refused_with_the_field_named(tiny: Tiny, route: str, fields: dict, named: str):
    """A response that relies on an earlier one must not be answered without its history."""
    call = await ask(tiny, ANSWER, route, {**body_of(route), **fields})
    assert call.status == 400
    error = call.json["error"]
    assert error["type"] == "invalid_request_error"
    if "param" in error:
        assert error["param"] == named
    if fields.get("max_output_tokens") != 100_000:
        assert named.removesuffix(".type") in error["message"]


async def test_unknown_fields_are_accepted_and_named(tiny: Tiny):
    for route in CHAT_ROUTES:
        call = await ask(tiny, ANSWER, route, {**body_of(route), "zzz": 1, "user": "me"})
        assert call.status == 200
        assert call.response_headers[b"x-tandem-ignored-fields"] == b"zzz"


async def test_a_search_tool_of_openais_servers_is_left_out_and_named(tiny: Tiny):
    call = await ask(tiny, ANSWER, RESPONSES, body_of(RESPONSES, tools=[{"type": "web_search"}]))
    assert call.status == 200
    assert call.response_headers[b"x-tandem-ignored-fields"] == b"?"


async def test_a_form_asked_for_in_any_api_is_the_same_grammar(tiny: Tiny):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    asked = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": form["schema"]}}},
        RESPONSES: {"text": {"format": {**form, "name": "x"}}},
        MESSAGES: {"output_config": {"format": form}},
    }
    grammars = set()
    for route in CHAT_ROUTES:
        generator = ScriptedGenerator(obedient([*spell(tiny[0], "{}"), EOS], eos=(EOS,)), models=(SERVED,))
        call = await call_api(tiny[0], generator, post(route, {**body_of(route), **asked[route]}), tiny[1])
        assert call.status == 200, call.text
        grammars.add(generator.prompts[0].grammar)
    (grammar,) = grammars
    assert grammar
