"""Finished answers with a form are looked at: a violation, which no worker should let happen, is counted."""

import asyncio

import pytest

from gateway.text.grammar import choice_shape, json_shape, regex_shape
from gateway.text.verdict import MAX_CHARS, verdict_on
from tests.fakes.asgi import post
from tests.fakes.http_api import BODY, CHAT, COMPLETIONS, build_api, speaker

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"], "additionalProperties": False}
SHAPE = json_shape(SCHEMA, "x")


@pytest.mark.parametrize(
    ("shape", "text", "verdict"),
    [
        (SHAPE, '{"b": 1}', "fits"),
        (SHAPE, '\n\n{"b": 1}\n', "fits"),
        (SHAPE, '{"b": 1', "violates"),
        (SHAPE, '{"b": "é"}', "violates"),
        (SHAPE, "", "violates"),
        (json_shape({"type": "string"}, "x"), f'"{"é" * 1000}"', "fits"),
        (json_shape({"type": "string"}, "x"), f'"{"e" * MAX_CHARS}"', "unchecked"),
        (regex_shape("a+b", "x"), "aab", "fits"),
        (regex_shape("a+b", "x"), "aabb", "violates"),
        (choice_shape(["yes", "no"], "x"), "no", "fits"),
        (choice_shape(["yes", "no"], "x"), "maybe", "violates"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_verdict_on_a_text(shape, text, verdict):
    assert verdict_on(shape, text) == verdict


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "verdict"), [('{"b": 1}', "fits"), ('{"c": 1}', "violates")])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_is_counted_by_its_verdict(tokenizer, path, text, verdict, stream):
    api, metrics = build_api(speaker(tokenizer, text), tokenizer)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    about = {**BODY} if path == CHAT else {"model": BODY["model"], "prompt": "p"}
    call = await post(path, {**about, "max_tokens": 100, "stream": stream, "response_format": form}).run(api)
    assert call.status == 200, call.text
    for _ in range(30_000):
        if counts(metrics):
            break
        await asyncio.sleep(0.001)
    assert counts(metrics) == {verdict: 1}


async def test_what_a_limit_cuts_is_no_violation(tokenizer):
    api, metrics = build_api(speaker(tokenizer, '{"b": 1}'), tokenizer)
    asked = {**BODY, "max_tokens": 2, "response_format": {"type": "json_object"}}
    call = await post(CHAT, asked).run(api)
    assert call.json["choices"][0]["finish_reason"] == "length"
    await asyncio.sleep(0.01)
    assert not counts(metrics)


def counts(metrics):
    lines = metrics.render().decode().splitlines()
    found = {
        line.split('"')[1]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("tandem_http_structured_answers_total{")
    }
    return {verdict: count for verdict, count in found.items() if count}
