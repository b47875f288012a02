"""The timing extension: told with the end of an answer, in every API, to those who ask."""

import json

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import post
from tests.fakes.http_api import CHAT, COMPLETIONS, call_api, speaker
from tests.fakes.streams import CHAT_ROUTES, RESPONSES, body_of, split_events

ROUTES = [*CHAT_ROUTES, COMPLETIONS]


def told_of(route: str, data: bytes) -> list[dict]:
    events = [json.loads(body) for _, body in split_events(data) if body != "[DONE]"]
    last = events[-1]["response"] if route == RESPONSES else events[-1]
    assert all("timing" not in event for event in events[:-1])
    return last["timing"]


@pytest.mark.parametrize("route", ROUTES)
async def test_an_answer_tells_when_things_happened(tokenizer: Tokenizer, route: str):
    payload = body_of(route, timing=True)
    whole = (await call_api(tokenizer, speaker(tokenizer), post(route, payload))).json
    stream = await call_api(tokenizer, speaker(tokenizer), post(route, {**payload, "stream": True}))
    for (timing,) in (whole["timing"], told_of(route, stream.text)):
        times = [timing[name] for name in ("arrived", "tokenized", "first_token", "last_token")]
        assert all(isinstance(time, int) for time in times)
        assert times == sorted(times)
        assert timing["prompt_computed"] is None, "no worker said so"


async def test_every_choice_has_its_own(tokenizer: Tokenizer):
    whole = (await call_api(tokenizer, speaker(tokenizer), post(CHAT, body_of(CHAT, timing=True, n=3)))).json
    assert len(whole["timing"]) == 3


@pytest.mark.parametrize("route", ROUTES)
async def test_nobody_else_is_told(tokenizer: Tokenizer, route: str):
    assert b"timing" not in (await call_api(tokenizer, speaker(tokenizer), post(route, body_of(route)))).text
    payload = body_of(route, stream=True)
    assert b"timing" not in (await call_api(tokenizer, speaker(tokenizer), post(route, payload))).text
