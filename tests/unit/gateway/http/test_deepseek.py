"""DeepSeek's chats through the HTTP interface: reasoning, tool calls and images as the OpenAI API spells them."""

import json

import pytest

from gateway.text.chat import ChatFormat
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import Call, post
from tests.fakes.deepseek import (
    ARGUMENTS,
    CALL_TEXT,
    EOS,
    IMAGE_ID,
    SERVED,
    WEATHER,
    data_url,
    load_chat,
    picture,
    spell,
    write_directory,
)
from tests.fakes.generator import ScriptedGenerator, obedient
from tests.fakes.http_api import CHAT, COMPLETIONS, call_api, serve_api
from tests.fakes.tokenizer import build_tokenizer

USER = {"role": "user", "content": "Hi"}
THOUGHT, SAID = "Let me think 🤔.", "Hello, 你好 🌍 the end"
ANSWER = f"{THOUGHT}\n</think>\n\n{SAID}"
CALLING = f"{THOUGHT}</think>I look it up.\n\n{CALL_TEXT}"
BODY = {"model": "tiny", "messages": [USER], "max_tokens": 1000}

Tiny = tuple[Tokenizer, ChatFormat]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    return load_chat(write_directory(tmp_path_factory.mktemp("tiny")))


def says(tiny: Tiny, text: str, **options) -> ScriptedGenerator:
    script = obedient([*spell(tiny[0], text), EOS], eos=(EOS,), **options)
    return ScriptedGenerator(script, models=(SERVED,))


async def ask(tiny: Tiny, text: str, payload: dict, **options) -> Call:
    return await call_api(tiny[0], says(tiny, text, **options), post(CHAT, payload), tiny[1])


def events_of(call: Call) -> list[dict]:
    parts = call.text.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_reasoning_is_split_off_the_whole_answer_and_counted(tiny):
    whole = (await ask(tiny, ANSWER, BODY)).json
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = whole["usage"]
    assert usage["completion_tokens"] == len(spell(tiny[0], ANSWER)) + 1
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(spell(tiny[0], f"{THOUGHT}\n</think>"))}


async def test_without_thinking_there_is_no_reasoning_and_no_count_of_it(tiny):
    whole = (await ask(tiny, SAID, {**BODY, "thinking": {"type": "disabled"}})).json
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}
    assert "completion_tokens_details" not in whole["usage"]


async def test_a_tool_call_is_told_in_the_openai_shape(tiny):
    whole = (await ask(tiny, CALLING, {**BODY, "tools": [WEATHER]})).json
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look it up."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


async def test_a_message_that_only_calls_has_no_content(tiny):
    payload = {**BODY, "tools": [WEATHER], "thinking": {"type": "disabled"}}
    message = (await ask(tiny, CALL_TEXT, payload)).json["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_a_call_cut_off_by_the_length_ends_in_length(tiny):
    whole = (await ask(tiny, CALLING, {**BODY, "tools": [WEATHER], "max_tokens": 150})).json
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_without_tools_the_markup_is_text(tiny):
    message = (await ask(tiny, CALLING, BODY)).json["choices"][0]["message"]
    assert CALL_TEXT in message["content"]
    assert "tool_calls" not in message


async def test_the_stream_of_a_tool_call_byte_by_byte(tiny):
    payload = {**BODY, "tools": [WEATHER], "stream": True}
    call = await ask(tiny, f"Hm.</think>{CALL_TEXT}", payload, chunk=1000)
    deltas = [(event["choices"][0]["delta"], event["choices"][0]["finish_reason"]) for event in events_of(call)]
    (opening, reasoning, calls, end) = deltas
    assert opening == ({"role": "assistant", "content": None, "reasoning_content": ""}, None)
    assert reasoning == ({"reasoning_content": "Hm."}, None)
    (told,) = calls[0]["tool_calls"]
    call_id = told.pop("id")
    assert told == {
        "index": 0,
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'},
    }
    assert call_id
    assert end == ({}, "tool_calls")


async def test_ids_of_calls_differ_between_choices_and_requests(tiny):
    payload = {**BODY, "tools": [WEATHER], "n": 2}
    ids = []
    for _ in range(2):
        whole = (await ask(tiny, CALLING, payload)).json
        ids += [choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]]
    assert len(set(ids)) == 4


VARIANTS = [
    {},
    {"n": 2},
    {"thinking": {"type": "disabled"}},
    {"reasoning_effort": "low"},
    {"chat_template_kwargs": {"thinking": False}},
    {"tools": [WEATHER]},
    {"tools": [WEATHER], "thinking": {"type": "disabled"}, "n": 2},
    {"tools": [WEATHER], "tool_choice": "none"},
    {"stop": "look"},
    {"stop": ["好", "tool"], "tools": [WEATHER]},
    {"max_tokens": 9},
    {"max_tokens": 120, "tools": [WEATHER]},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "tools": [WEATHER], "n": 2},
    {"skip_special_tokens": False, "ignore_eos": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("text", [ANSWER, CALLING, "Only thoughts", ""], ids=["answer", "call", "thoughts", "nothing"])
async def test_a_streamed_answer_adds_up_to_the_whole_one(tiny, variant, text):
    payload = {**BODY, **variant}
    whole = (await ask(tiny, text, payload)).json
    for chunk in (1, 7):
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        events = events_of(await ask(tiny, text, {**payload, **stream}, chunk=chunk))
        summed = [summed_choice(events, index) for index in range(variant.get("n", 1))]
        assert summed == [plain_choice(choice) for choice in whole["choices"]]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]
        if "logprobs" in variant:
            told = sum(len(entries) for choice in summed for entries in choice["logprobs"].values())
            assert told == whole["usage"]["completion_tokens"]


def plain_choice(choice: dict) -> dict:
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [
            (call["type"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", [])
        ],
        "finish": choice["finish_reason"],
        "logprobs": {key: value for key, value in (choice["logprobs"] or {}).items() if value},
    }


def summed_choice(events: list[dict], index: int) -> dict:
    parts = [part for event in events for part in event["choices"] if part["index"] == index]
    calls: dict[int, list[str]] = {}
    logprobs: dict[str, list] = {}
    for part in parts:
        for call in part["delta"].get("tool_calls", []):
            known = calls.setdefault(call["index"], ["", "", ""])
            known[0] += call.get("type", "")
            known[1] += call["function"].get("name", "")
            known[2] += call["function"]["arguments"]
        for key, entries in (part["logprobs"] or {}).items():
            if entries:
                logprobs.setdefault(key, []).extend(entries)
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    return {
        "content": "".join(part["delta"].get("content") or "" for part in parts),
        "reasoning": "".join(part["delta"].get("reasoning_content") or "" for part in parts),
        "calls": [tuple(calls[number]) for number in sorted(calls)],
        "finish": parts[-1]["finish_reason"],
        "logprobs": logprobs,
    }


async def test_the_official_client_makes_a_round_trip_with_a_tool(tiny):
    tokenizer, form = tiny
    result = '{"sky": "sunny"}'

    def answers(prompt):
        asked = tokenizer.decode(prompt.token_ids)
        told = f"Good.</think>It is {json.loads(result)['sky']}." if "<tool_result>" in asked else CALLING
        return obedient([*spell(tokenizer, told), EOS], eos=(EOS,))(prompt)

    generator = ScriptedGenerator(answers, models=(SERVED,))
    messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    async with serve_api(generator, tokenizer, chat_format=form) as served:
        first = await served.openai.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        message = first.choices[0].message
        assert message.reasoning_content == THOUGHT
        assert first.usage.completion_tokens_details.reasoning_tokens > 0
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == ARGUMENTS
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        second = await served.openai.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        assert second.choices[0].message.content == "It is sunny."
        stream = await served.openai.chat.completions.create(
            model="tiny", messages=messages[:1], tools=[WEATHER], stream=True
        )
        arguments, names = "", []
        async for chunk in stream:
            for part in chunk.choices[0].delta.tool_calls or []:
                arguments += part.function.arguments
                names += [part.function.name] if part.function.name else []
        assert (names, json.loads(arguments)) == (["get_weather"], ARGUMENTS)
    prompt = tokenizer.decode(generator.prompts[1].token_ids, skip_special=False)
    assert f"<tool_result>{result}</tool_result>" in prompt
    assert f"<think>{THOUGHT}</think>" in prompt


async def test_the_official_client_sends_an_image(tiny):
    tokenizer, form = tiny
    generator = says(tiny, ANSWER)
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": data_url(picture(120, 90)), "detail": "high"}},
    ]
    async with serve_api(generator, tokenizer, chat_format=form) as served:
        answer = await served.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], n=2
        )
    assert answer.choices[1].message.content == SAID
    for prompt in generator.prompts:
        (image,) = prompt.images
        assert prompt.token_ids[image.start : image.end] == (IMAGE_ID,) * (image.end - image.start)
        assert prompt.token_ids.count(IMAGE_ID) == image.end - image.start
        assert len(image.pixels) == image.height * image.width * 3
    assert answer.usage.prompt_tokens == len(generator.prompts[0].token_ids)


BAD = [
    ({"url": "https://example.com/cat.png"}, "data: URLs only"),
    ({"url": "data:image/png;base64,AAAA"}, "can be read"),
]


@pytest.mark.parametrize(("image", "words"), BAD, ids=str)
async def test_an_image_that_cannot_be_taken_is_a_400_with_its_place(tiny, image, words):
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": image}]
    call = await ask(tiny, ANSWER, {**BODY, "messages": [{"role": "user", "content": content}]})
    assert call.status == 400
    assert call.json["error"]["param"] == "messages[0].content[1].image_url"
    assert words in call.json["error"]["message"]


async def test_an_image_that_leaves_no_room_for_an_answer_never_fits(tiny):
    content = [{"type": "image_url", "image_url": {"url": data_url(picture(50, 50))}}]
    generator = ScriptedGenerator(
        obedient([EOS]),
        models=(type(SERVED)(name="tiny", max_tokens_total=20, vocab_size=512, eos_token_ids=(EOS,)),),
    )
    payload = {**BODY, "messages": [{"role": "user", "content": content}]}
    call = await call_api(tiny[0], generator, post(CHAT, payload), tiny[1])
    assert call.status == 400
    assert "deployment holds at most 20" in call.json["error"]["message"]


async def test_plain_completions_work_beside_the_chat_format(tiny):
    payload = {"model": "tiny", "prompt": "x", "max_tokens": 100}
    call = await call_api(tiny[0], says(tiny, SAID), post(COMPLETIONS, payload), tiny[1])
    assert call.json["choices"][0]["text"] == SAID
    assert "completion_tokens_details" not in call.json["usage"]


async def test_switches_without_meaning_for_a_model_are_named_in_the_header(tmp_path):
    tokenizer = build_tokenizer(tmp_path)
    generator = ScriptedGenerator(obedient([2]))
    payload = {"model": "tiny", "messages": [USER], "reasoning_effort": "low", "thinking": {"type": "enabled"}}
    call = await call_api(tokenizer, generator, post(CHAT, payload))
    assert call.status == 200
    assert call.response_headers[b"x-tandem-ignored-fields"] == b"reasoning_effort, thinking"
