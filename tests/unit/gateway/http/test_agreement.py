"""A streamed answer adds up to the whole one: text, ends, usage, log-probabilities."""

import json

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import post
from tests.fakes.http_api import BODY, CHAT, COMPLETIONS, call_api, speaker

VARIANTS = [
    {},
    {"n": 3},
    {"stop": "the"},
    {"stop": ["zzz", "好"], "n": 2},
    {"max_tokens": 5},
    {"max_completion_tokens": 4, "max_tokens": 9},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "stop": "world", "n": 2},
    {"stop_token_ids": [72], "skip_special_tokens": False},
    {"ignore_eos": True, "min_tokens": 3, "stop": "e"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("chunk", [1, 3])
async def test_a_streamed_chat_adds_up_to_the_whole_one(tokenizer: Tokenizer, variant: dict, chunk: int):
    payload = {**BODY, **variant}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    whole = (await call_api(tokenizer, speaker(tokenizer, chunk=1, cached=2), post(CHAT, payload))).json
    call = await call_api(tokenizer, speaker(tokenizer, chunk=chunk, cached=2), post(CHAT, {**payload, **options}))
    choices = [{"text": "", "logprobs": [], "finish": None} for _ in range(variant.get("n", 1))]
    events = parse_events(call.text)
    for data in events[:-1]:
        (part,) = data["choices"]
        choice = choices[part["index"]]
        assert choice["finish"] is None
        choice["text"] += part["delta"].get("content", "")
        choice["logprobs"] += part["logprobs"]["content"] if part["logprobs"] else []
        choice["finish"] = part["finish_reason"]
    assert choices == [
        {
            "text": choice["message"]["content"],
            "logprobs": choice["logprobs"]["content"] if choice["logprobs"] else [],
            "finish": choice["finish_reason"],
        }
        for choice in whole["choices"]
    ]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    if "logprobs" in variant:
        assert sum(len(choice["logprobs"]) for choice in choices) == whole["usage"]["completion_tokens"]


COMPLETION_VARIANTS = [
    {},
    {"prompt": ["a", "bc"], "n": 2, "echo": True},
    {"prompt": [[70, 71], [72]], "echo": True},
    {"logprobs": 2, "stop": "好"},
    {"prompt": [70, 71, 72], "max_tokens": 3},
]


@pytest.mark.parametrize("variant", COMPLETION_VARIANTS, ids=str)
@pytest.mark.parametrize("chunk", [1, 4])
async def test_a_streamed_completion_adds_up_to_the_whole_one(tokenizer: Tokenizer, variant: dict, chunk: int):
    payload = {"model": "tiny", "prompt": "x", "max_tokens": 40, **variant}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    whole = (await call_api(tokenizer, speaker(tokenizer), post(COMPLETIONS, payload))).json
    call = await call_api(tokenizer, speaker(tokenizer, chunk=chunk), post(COMPLETIONS, {**payload, **options}))
    choices = [{"text": "", "logprobs": None, "finish": None} for _ in whole["choices"]]
    events = parse_events(call.text)
    for data in events[:-1]:
        (part,) = data["choices"]
        choice = choices[part["index"]]
        choice["text"] += part["text"]
        choice["finish"] = part["finish_reason"]
        if part["logprobs"]:
            choice["logprobs"] = choice["logprobs"] or {key: [] for key in part["logprobs"]}
            for key, values in part["logprobs"].items():
                choice["logprobs"][key] += values
    assert choices == [
        {"text": choice["text"], "logprobs": choice["logprobs"], "finish": choice["finish_reason"]}
        for choice in whole["choices"]
    ]
    assert events[-1]["usage"] == whole["usage"]


def parse_events(data: bytes) -> list[dict]:
    """Strict: every event is one data line of JSON and a blank line, the last is the end mark."""
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
