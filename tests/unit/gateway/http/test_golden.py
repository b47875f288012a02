"""Exact bytes of streams and answers: what clients parse may not change by accident."""

import re

from core.errors import WorkerLost
from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import Call, post
from tests.fakes.generator import ScriptedGenerator, play
from tests.fakes.http_api import build_api

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
ID = re.compile(rb'"id":"(chatcmpl|cmpl)-[0-9a-f]{24}"')


async def ask(tokenizer: Tokenizer, script, path: str, payload: dict) -> Call:
    api, _ = build_api(ScriptedGenerator(script), tokenizer)
    return await post(path, payload).run(api)


def masked(data: bytes) -> str:
    masked, count = ID.subn(b'"id":"ID"', data)
    assert count == data.count(b'"id":')
    return masked.decode()


def hello(tokenizer: Tokenizer, num_logprobs: int = -1):
    ids = [*tokenizer.encode_prompt('"Hi" €')]
    return lambda prompt: play(ids, finish=FinishReason.STOP, cached=2, num_logprobs=num_logprobs)


async def test_a_chat_stream(tokenizer: Tokenizer):
    call = await ask(tokenizer, hello(tokenizer), "/v1/chat/completions", {**CHAT, "stream": True})
    head = 'data: {"id":"ID","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":['

    def text(content: str) -> str:
        return f'{head}{{"index":0,"delta":{{"content":{content}}},"logprobs":null,"finish_reason":null}}]}}\n\n'

    assert masked(call.text) == (
        f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        + text('"\\""')
        + text('"H"')
        + text('"i"')
        + text('"\\""')
        + text('" "')
        + text('"€"')
        + f'{head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        + "data: [DONE]\n\n"
    )
    assert call.messages[0]["headers"][:3] == [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    # One write a delta: the role goes out with the first token, the end with the last.
    assert len(call.chunks) == 6
    assert call.chunks[0].count(b"data: ") == 2
    assert call.chunks[-1].count(b"data: ") == 3


async def test_a_chat_stream_with_usage_and_logprobs(tokenizer: Tokenizer):
    payload = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1}
    ids = tokenizer.encode_prompt("H")
    call = await ask(tokenizer, lambda _: play(ids, cached=1, num_logprobs=1), "/v1/chat/completions", payload)
    head = 'data: {"id":"ID","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":['
    other = tokenizer.vocabulary.bytes_of(ids[0] + 0).decode()
    entry = f'"token":"{other}","logprob":-0.25,"bytes":[72]'
    prompt_tokens = len(tokenizer.render_chat(CHAT["messages"]))
    assert masked(call.text) == (
        f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{head}{{"index":0,"delta":{{"content":"H"}},"logprobs":{{"content":[{{{entry},"top_logprobs":[{{{entry}}}]}}],"refusal":null}},"finish_reason":null}}],"usage":null}}\n\n'
        f'{head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length"}}],"usage":null}}\n\n'
        f'{head}],"usage":{{"prompt_tokens":{prompt_tokens},"completion_tokens":1,"total_tokens":{prompt_tokens + 1},"prompt_tokens_details":{{"cached_tokens":1}}}}}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_a_completion_stream_with_echo_and_continuous_usage(tokenizer: Tokenizer):
    payload = {"model": "tiny", "prompt": "ab", "stream": True, "echo": True}
    payload["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    ids = tokenizer.encode_prompt("H")
    call = await ask(tokenizer, lambda _: play(ids), "/v1/completions", payload)
    head = 'data: {"id":"ID","object":"text_completion","created":1700000000,"model":"tiny","choices":['

    def usage(count: int) -> str:
        return f'"usage":{{"prompt_tokens":2,"completion_tokens":{count},"total_tokens":{count + 2},"prompt_tokens_details":{{"cached_tokens":0}}}}}}\n\n'

    assert masked(call.text) == (
        f'{head}{{"index":0,"text":"ab","logprobs":null,"finish_reason":null}}],{usage(0)}'
        f'{head}{{"index":0,"text":"H","logprobs":null,"finish_reason":null}}],{usage(1)}'
        f'{head}{{"index":0,"text":"","logprobs":null,"finish_reason":"length"}}],{usage(1)}'
        f"{head}],{usage(1)}"
        "data: [DONE]\n\n"
    )


async def test_a_whole_chat(tokenizer: Tokenizer):
    call = await ask(tokenizer, hello(tokenizer), "/v1/chat/completions", CHAT)
    prompt_tokens = len(tokenizer.render_chat(CHAT["messages"]))
    assert masked(call.text) == (
        '{"id":"ID","object":"chat.completion","created":1700000000,"model":"tiny","choices":['
        '{"index":0,"message":{"role":"assistant","content":"\\"Hi\\" €","refusal":null},"logprobs":null,"finish_reason":"stop"}],'
        f'"usage":{{"prompt_tokens":{prompt_tokens},"completion_tokens":8,"total_tokens":{prompt_tokens + 8},"prompt_tokens_details":{{"cached_tokens":2}}}}}}'
    )


async def test_a_whole_completion_with_logprobs(tokenizer: Tokenizer):
    ids = tokenizer.encode_prompt("Hi")
    payload = {"model": "tiny", "prompt": "ab", "logprobs": 0}
    call = await ask(tokenizer, lambda _: play(ids, num_logprobs=0), "/v1/completions", payload)
    assert masked(call.text) == (
        '{"id":"ID","object":"text_completion","created":1700000000,"model":"tiny","choices":['
        '{"index":0,"text":"Hi","logprobs":{"tokens":["H","i"],"token_logprobs":[-0.25,-0.25],'
        '"top_logprobs":[{"H":-0.25},{"i":-0.25}],"text_offset":[0,1]},"finish_reason":"length"}],'
        '"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}}'
    )


async def test_an_error_after_the_first_token_ends_the_stream_without_the_end_mark(tokenizer: Tokenizer):
    first = Delta(token_ids=tokenizer.encode_prompt("H"))
    script = lambda _: [first, WorkerLost("decode-1 is gone")]
    call = await ask(tokenizer, script, "/v1/chat/completions", {**CHAT, "stream": True})
    assert call.status == 200
    assert call.is_complete
    assert b"[DONE]" not in call.text
    assert call.text.endswith(
        b'data: {"error":{"message":"decode-1 is gone","type":"server_error","param":null,"code":"worker_lost"}}\n\n'
    )
