"""Our conversions beside those of the published package: equal prompts where both convert, ours where it drops.

The package's silent habits are pinned here (gateway.md 3.4), so that an upgrade that changes them is noticed.
"""

import json

import deepseek_recipe as recipe
import pytest

from gateway.http.messages_body import MessagesBody, messages_chat
from gateway.http.responses_body import ResponsesBody, responses_ask
from gateway.http.schema import decode_body
from gateway.text.chat import Chat, ChatFormat
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import post
from tests.fakes.deepseek import CALL_TEXT, EOS, SERVED, load_chat, spell, write_trained
from tests.fakes.generator import ScriptedGenerator, obedient
from tests.fakes.http_api import CHAT, call_api
from tests.fakes.streams import MESSAGES, RESPONSES, body_of

Trained = tuple[Tokenizer, ChatFormat]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    return load_chat(write_trained(tmp_path_factory.mktemp("trained")))


def theirs(kind, body: dict) -> str:
    options = recipe.ConversionOptions().with_model_versions_by_name({"m": recipe.ModelVersion.DeepseekV41Flash})
    return recipe.DeepseekV41Encoding().render_conversation(kind(body).convert(options).conversation).prompt


def ours(trained: Trained, chat: Chat) -> str:
    return trained[0].decode(trained[1].render(chat).token_ids, skip_special=False)


SCHEMA = {"type": "object", "properties": {"c": {"type": "string"}}}
TOOL = {"type": "function", "name": "w", "description": "d", "parameters": SCHEMA}
CALLS = [
    {"type": "function_call", "call_id": f"c{number}", "name": "w", "arguments": f'{{"c": "{number}"}}'}
    for number in range(2)
]
RESULTS = [
    {"type": "function_call_output", "call_id": "c0", "output": "sun"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
]
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
USER = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
RESPONSE_BODIES = [
    {"input": "hi"},
    {"input": "hi", "instructions": "be nice"},
    {"input": [{"role": "developer", "content": "dev"}, USER]},
    {"input": [USER, THOUGHT, SAID, {"role": "user", "content": "and?"}]},
    {"input": [USER, THOUGHT, *CALLS, *RESULTS], "tools": [TOOL]},
    {"input": [USER, SAID, *CALLS, *RESULTS, USER], "tools": [TOOL], "reasoning": {"effort": "none"}},
    {"input": [USER, THOUGHT, SAID, CALLS[0], RESULTS[0], THOUGHT, SAID, USER], "tools": [TOOL]},
    {"input": [USER, SAID, SAID, USER], "reasoning": {"effort": "high"}},
    {"input": "hi", "tools": [TOOL], "tool_choice": "none"},
]


@pytest.mark.parametrize("body", RESPONSE_BODIES, ids=range(len(RESPONSE_BODIES)))
def test_a_response_asks_the_same_prompt_as_the_package_would(trained: Trained, body: dict):
    full = {"model": "m", **body}
    assert ours(trained, responses_ask(decoded(full, ResponsesBody)).chat) == theirs(recipe.ResponsesRequest, full)


TOOL_USE = {"type": "tool_use", "id": "t1", "name": "w", "input": {"c": "x", "n": [1, {"k": None}]}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]}
THINKING = {"type": "thinking", "thinking": "th", "signature": "x"}
TEXT = {"type": "text", "text": "ok"}
CUSTOM = {"name": "w", "description": "d", "input_schema": SCHEMA}
MESSAGE_BODIES = [
    {"messages": [{"role": "user", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "hi"}], "system": "sys", "thinking": {"type": "disabled"}},
    {"messages": [{"role": "user", "content": [TEXT, TEXT]}], "system": [TEXT, TEXT]},
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [THINKING, TEXT, TOOL_USE]},
            {"role": "user", "content": [RESULT, TEXT]},
        ],
        "tools": [CUSTOM],
    },
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [TOOL_USE]},
            {"role": "user", "content": [{**RESULT, "content": "x", "is_error": True}]},
        ],
        "tools": [CUSTOM],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low"},
    },
    {"messages": [{"role": "user", "content": "hi"}], "tools": [CUSTOM], "tool_choice": {"type": "none"}},
]


@pytest.mark.parametrize("body", MESSAGE_BODIES, ids=range(len(MESSAGE_BODIES)))
def test_a_message_asks_the_same_prompt_as_the_package_would(trained: Trained, body: dict):
    full = {"model": "m", "max_tokens": 5, **body}
    assert ours(trained, messages_chat(decoded(full, MessagesBody))) == theirs(recipe.MessagesRequest, full)


def test_the_comparison_would_find_a_lost_turn(trained: Trained):
    full = {"model": "m", **RESPONSE_BODIES[3]}
    shorter = {**full, "input": full["input"][:-2]}
    assert ours(trained, responses_ask(decoded(shorter, ResponsesBody)).chat) != theirs(recipe.ResponsesRequest, full)


def test_a_message_begun_by_the_client_is_continued(trained: Trained):
    """The package closes the begun answer and opens another."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    full = {"model": "m", "max_tokens": 5, "messages": turns, "thinking": {"type": "disabled"}}
    assert ours(trained, messages_chat(decoded(full, MessagesBody))).endswith("</think>The answer is")
    assert not theirs(recipe.MessagesRequest, full).endswith("The answer is")


def decoded(body: dict, kind):
    return decode_body(recipe_json(body), kind).body


def recipe_json(body: dict) -> bytes:
    return post("", body).body


IGNORED_BY_THE_PACKAGE = [
    ("max_completion_tokens", 7, lambda p: p.stop.max_tokens == 7),
    ("frequency_penalty", 0.5, lambda p: p.sampling.frequency_penalty == 0.5),
    ("presence_penalty", 0.5, lambda p: p.sampling.presence_penalty == 0.5),
    ("logit_bias", {"5": 2.0}, lambda p: p.sampling.logit_bias == {5: 2.0}),
    ("min_tokens", 3, lambda p: p.stop.min_tokens == 3),
    ("ignore_eos", True, lambda p: p.stop.ignore_eos),
    ("top_k", 4, lambda p: p.sampling.top_k == 4),
    ("min_p", 0.25, lambda p: p.sampling.min_p == 0.25),
    ("repetition_penalty", 1.5, lambda p: p.sampling.repetition_penalty == 1.5),
    ("stop_token_ids", [9], lambda p: p.stop.stop_token_ids == (9,)),
    ("temperature", 0.5, lambda p: p.sampling.temperature == 0.5),
    ("priority", 2, lambda p: p.priority == 2),
    ("cache_salt", "s", lambda p: p.cache_salt == "s"),
    ("seed", 11, lambda p: p.sampling.seed == 11),
    ("top_p", 0.5, lambda p: p.sampling.top_p == 0.5),
]


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("field", "value", "arrived"), IGNORED_BY_THE_PACKAGE, ids=[row[0] for row in IGNORED_BY_THE_PACKAGE]
)
async def test_what_the_package_drops_reaches_the_workers(trained: Trained, route: str, field: str, value, arrived):
    if field == "max_completion_tokens" and route != CHAT:
        pytest.skip("a field of chats")
    tokenizer, form = trained
    served = type(SERVED)(name="tiny", max_tokens_total=8192, vocab_size=900, eos_token_ids=(EOS,))
    generator = ScriptedGenerator(obedient([*spell(tokenizer, "x"), EOS], eos=(EOS,)), models=(served,))
    call = await call_api(tokenizer, generator, post(route, {**body_of(route), field: value}), form)
    assert call.status == 200, call.text
    assert arrived(generator.prompts[0])


@pytest.mark.parametrize(
    "field", ["max_completion_tokens", "top_k", "min_p", "stop_token_ids", "frequency_penalty", "zzz"]
)
def test_the_package_still_drops_without_a_word(field: str):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    options = recipe.ConversionOptions().with_model_versions_by_name({"m": recipe.ModelVersion.DeepseekV41Flash})
    value = [5] if field == "stop_token_ids" else 1
    plain = recipe.ChatCompletionRequest(body).convert(options).inference_options
    asked = recipe.ChatCompletionRequest({**body, field: value}).convert(options).inference_options
    assert asked.max_tokens == plain.max_tokens
    assert asked.temperature == plain.temperature


def test_the_package_answers_a_follow_up_without_its_history():
    """Why `previous_response_id` is refused."""
    body = {"model": "m", "input": "and then?"}
    assert theirs(recipe.ResponsesRequest, {**body, "previous_response_id": "resp_1"}) == theirs(
        recipe.ResponsesRequest, body
    )


# What the package's parser leaves to its caller (gateway.md 3.5): `gateway.text.deepseek_answer` is built on these.


def parsed(pieces: list[str], *, tools: bool = True, finish: bool = True) -> list[dict]:
    """The deltas of a chat's stream over texts."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
    if tools:
        function = {"name": "w", "parameters": SCHEMA}
        body["tools"] = [{"type": "function", "function": function}]
    options = recipe.ConversionOptions().with_model_versions_by_name({"m": recipe.ModelVersion.DeepseekV41Flash})
    request = recipe.ChatCompletionRequest(body).convert(options)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "m")
    processor = recipe.StreamProcessor(generator, request.parsing_options)
    events = list(processor.push(recipe.InferenceChunk.ready()))
    for piece in pieces:
        events += processor.push(recipe.InferenceChunk.text(piece))
    if finish:
        events += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        events += processor.finish()
    else:
        processor.close()
    return [json.loads(event.to_json()) for event in events]


def content(events: list[dict]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


MARKUP = CALL_TEXT.replace("get_weather", "w")


def test_the_parser_shows_the_end_token_unless_it_is_taken_away():
    assert content(parsed(["Hi", "<｜end▁of▁sentence｜>"])) == "Hi<｜end▁of▁sentence｜>"


def test_the_parser_puts_usage_where_openai_does_not():
    events = parsed(["Hi"])
    assert events[-1]["choices"], "no chunk of its own for usage"
    assert events[-1]["usage"] is not None


def test_the_parser_drops_text_behind_calls_and_swallows_a_broken_begin():
    assert content(parsed([MARKUP, "and more"])) == ""
    assert content(parsed(["So. \n\n<｜DSML｜ calls>\n<｜DSML｜ inv"])) == "So. "


def test_the_parser_takes_the_name_first_and_passes_unknown_ones():
    calls = [call for event in parsed([MARKUP]) for call in event["choices"][0]["delta"].get("tool_calls") or []]
    assert calls[0]["function"]["name"] == "w"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Paris", "days": 3}
    unknown = parsed([CALL_TEXT])
    assert any(event["choices"][0]["delta"].get("tool_calls") for event in unknown)


def test_the_parser_copies_broken_arguments_as_they_are():
    broken = MARKUP.replace(">3<", ">3x{<")
    calls = [call for event in parsed([broken]) for call in event["choices"][0]["delta"].get("tool_calls") or []]
    with pytest.raises(ValueError, match="delimiter"):
        json.loads("".join(call["function"]["arguments"] for call in calls))


def test_the_parser_leaves_markup_as_text_where_there_are_no_tools():
    assert content(parsed([MARKUP], tools=False)) == MARKUP
