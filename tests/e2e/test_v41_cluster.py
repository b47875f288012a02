"""DeepSeek-V4.1's chat format through whole clusters: tool calls on the scripted model, images on the tiny one."""

import json

import anthropic
import openai
import pytest

from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.tokenizer_files import FIRST_BYTE, THINK_END, token_ids
from engine.models.scripted_v41 import (
    GREETING,
    GREETING_ANSWER,
    GREETING_REASONING,
    NAME,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_REASONING,
    WEATHER_RESULT,
)
from tests.fakes.audit import held_pages
from tests.fakes.deepseek import ARGUMENTS, WEATHER, data_url, picture
from tests.fakes.live_cluster import running_cluster, wait_for

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    audit = ("--set", "all:engine.audit_every_steps=1")
    with running_cluster(tmp_path_factory.mktemp("scripted"), *audit, model=NAME) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=cluster.base_url + "/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def ask(client, messages, **more):
    return client.chat.completions.create(model=NAME, messages=messages, temperature=0, **more)


def greeting():
    return [{"role": "user", "content": GREETING}]


def summed(stream):
    """(reasoning, text, calls by index as [id, name, arguments], finish reason) of a stream."""
    reasoning, text, calls, finish = "", "", {}, None
    for chunk in stream:
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or []:
                known = calls.setdefault(part.index, ["", "", ""])
                known[0] += part.id or ""
                known[1] += part.function.name or ""
                known[2] += part.function.arguments or ""
    return reasoning, text, calls, finish


def test_reasoning_is_split_off_and_counted(client):
    answer = ask(client, greeting())
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (GREETING_REASONING, GREETING_ANSWER)
    assert answer.choices[0].finish_reason == "stop"
    # One token per byte, the closing mark, and the end.
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(GREETING_REASONING) + 1
    assert answer.usage.completion_tokens == len(GREETING_REASONING) + 1 + len(GREETING_ANSWER) + 1
    assert summed(ask(client, greeting(), stream=True)) == (GREETING_REASONING, GREETING_ANSWER, {}, "stop")


@pytest.mark.parametrize(
    "off",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"thinking": {"type": "disabled"}}},
        {"extra_body": {"chat_template_kwargs": {"thinking": False}}},
    ],
    ids=str,
)
def test_thinking_can_be_switched_off(client, off):
    answer = ask(client, greeting(), **off)
    assert answer.choices[0].message.content == GREETING_ANSWER
    assert getattr(answer.choices[0].message, "reasoning_content", None) is None
    assert answer.usage.completion_tokens == len(GREETING_ANSWER) + 1


def test_a_tool_call_makes_the_round_trip(client):
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    first = ask(client, messages, tools=[WEATHER])
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.reasoning_content == WEATHER_REASONING
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}]
    second = ask(client, messages, tools=[WEATHER])
    assert second.choices[0].message.content == WEATHER_ANSWER
    assert second.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_a_streamed_tool_call_is_the_whole_one(client):
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    reasoning, text, calls, finish = summed(ask(client, messages, tools=[WEATHER], stream=True))
    assert (reasoning, text, finish) == (WEATHER_REASONING, "", "tool_calls")
    ((_, (call_id, name, arguments)),) = calls.items()
    assert call_id.startswith("call_")
    assert name == "get_weather"
    assert json.loads(arguments) == ARGUMENTS


def test_several_choices_call_each_for_itself(client):
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    answer = ask(client, messages, tools=[WEATHER], n=3)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert {call.function.arguments for call in calls} == {calls[0].function.arguments}
    assert len({call.id for call in calls}) == 3


def test_a_model_without_an_image_encoder_says_so(client):
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError, match="takes no images"):
        ask(client, [{"role": "user", "content": content}])


def test_nothing_is_held_afterwards(cluster, client):
    ask(client, greeting())
    wait_for(lambda: held_pages(cluster) == 0, 60, "pages are still held")


# The tiny model itself: random weights, so what it says means nothing, but what it depends on does.

TINY = "v41-tiny"
CLOSING = token_ids(parse_config(tiny_config()))[THINK_END]


@pytest.fixture(scope="module")
def tiny_cluster(tmp_path_factory):
    audit = ("--set", "all:engine.audit_every_steps=1")
    with running_cluster(tmp_path_factory.mktemp("tiny"), *audit, model=TINY) as running:
        yield running


@pytest.fixture(scope="module")
def tiny(tiny_cluster):
    with openai.OpenAI(base_url=tiny_cluster.base_url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def look(client, image: int, salt: str, *, think: bool = False, **more):
    """Ask about the picture of that number; the salt says whose cache may be used."""
    content = [
        {"type": "image_url", "image_url": {"url": data_url(picture(200, 120, seed=image))}},
        {"type": "text", "text": "What is this?"},
    ]
    extra = {"cache_salt": salt, "thinking": {"type": "enabled" if think else "disabled"}}
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=TINY, messages=messages, extra_body=extra, **more)


def test_an_image_is_answered_with_the_reasoning_split_off(tiny):
    for seed in range(8):
        answer = look(tiny, 1, "a", think=True, seed=seed, max_tokens=16, logit_bias={CLOSING: 2})
        message, usage = answer.choices[0].message, answer.usage
        assert 0 < usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens
        assert "think>" not in (message.content or "") + message.reasoning_content
        if message.content and message.reasoning_content:
            return
    raise AssertionError("no answer had both reasoning and text")


def test_an_answer_depends_on_the_pixels_of_its_image(tiny):
    def first(seed: int, salt: str):
        answer = look(tiny, seed, salt, max_tokens=1, temperature=0, logprobs=True, top_logprobs=5)
        (token,) = answer.choices[0].logprobs.content
        return [(top.token, top.logprob) for top in token.top_logprobs]

    assert first(1, "x") == first(1, "y")
    assert first(1, "x2") != first(2, "x3")


def test_an_image_is_the_same_in_all_three_apis(tiny_cluster, tiny):
    """Vision through each SDK: equal prompts, so equal counts."""
    url = data_url(picture(200, 120, seed=7))
    extra = {"cache_salt": "apis", "seed": 1}
    off = {"thinking": {"type": "disabled"}}
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    chat_answer = tiny.chat.completions.create(model=TINY, messages=chat, max_tokens=2, extra_body={**extra, **off})
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    response = tiny.responses.create(
        model=TINY, input=items, max_output_tokens=2, reasoning={"effort": "none"}, extra_body=extra
    )
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with anthropic.Anthropic(base_url=tiny_cluster.base_url, api_key="none", max_retries=0, timeout=60) as claude:
        message = claude.messages.create(model=TINY, messages=turns, max_tokens=2, extra_body={**extra, **off})
    usage = message.usage
    prompts = {chat_answer.usage.prompt_tokens, response.usage.input_tokens}
    assert prompts == {usage.input_tokens + usage.cache_read_input_tokens}
    assert prompts.pop() > 20


def test_both_sdks_get_the_form_that_they_ask_for(tiny_cluster, tiny):
    """Random weights write valid answers: the form comes from the grammar alone."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    # Where space is allowed, random weights like it too much.
    extra = {"logit_bias": {FIRST_BYTE + byte: -100 for byte in b" \t\r\n"}}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = tiny.responses.create(
        model=TINY,
        input="Answer.",
        text={"format": form},
        reasoning={"effort": "none"},
        max_output_tokens=100,
        extra_body=extra,
    )
    with anthropic.Anthropic(base_url=tiny_cluster.base_url, api_key="none", max_retries=0, timeout=60) as claude:
        message = claude.messages.create(
            model=TINY,
            max_tokens=100,
            extra_body=extra,
            messages=[{"role": "user", "content": "Answer."}],
            thinking={"type": "disabled"},
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    for text in (response.output_text, message.content[0].text):
        told = json.loads(text)
        assert told.keys() == {"ok", "kind"}
        assert told["kind"] in ("a", "b")


def test_pages_of_an_image_are_reused_for_this_image_only(tiny):
    def cached(seed: int) -> int:
        return look(tiny, seed, "shared", max_tokens=1).usage.prompt_tokens_details.cached_tokens

    assert cached(3) == 0
    assert cached(3) > 0
    assert cached(4) == 0


def test_the_tiny_model_holds_nothing_afterwards(tiny_cluster, tiny):
    look(tiny, 5, "z", max_tokens=4)
    wait_for(lambda: held_pages(tiny_cluster) == 0, 60, "pages are still held")
