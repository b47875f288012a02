"""The official client over real sockets."""

import asyncio

import openai
import pytest

from core.errors import ContextExceeded, DeadlineExceeded, NeverFits, NoCapacity, NoWorker, WorkerLost
from gateway.generation import Delta
from gateway.text.tokenizer import Tokenizer
from tests.fakes.generator import ScriptedGenerator
from tests.fakes.http_api import ANSWER, BODY, MESSAGES, Serve, speaker


async def test_the_official_client_gets_a_whole_chat(serve: Serve, tokenizer: Tokenizer):
    async with serve(speaker(tokenizer, cached=3)) as served:
        answer = await served.openai.chat.completions.create(**BODY)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(tokenizer.render_chat(MESSAGES))
    assert answer.usage.completion_tokens == len(tokenizer.encode_prompt(ANSWER)) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_the_official_client_gets_a_streamed_completion(serve: Serve, tokenizer: Tokenizer):
    async with serve(speaker(tokenizer)) as served:
        stream = await served.openai.completions.create(
            model="tiny", prompt="x", stream=True, max_tokens=50, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 1 + len(tokenizer.encode_prompt(ANSWER)) + 1


async def test_the_synchronous_client_works_too(serve: Serve, tokenizer: Tokenizer):
    def talk(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
            whole = client.chat.completions.create(**BODY)
            parts = [
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**BODY, stream=True)
            ]
        return whole.choices[0].message.content, "".join(parts)

    async with serve(speaker(tokenizer)) as served:
        assert await asyncio.to_thread(talk, served.url) == (ANSWER, ANSWER)


ERRORS = [
    (NeverFits("too long", param="messages"), openai.BadRequestError, 400, None),
    (NoCapacity("busy", retry_after_s=3), openai.RateLimitError, 429, "3"),
    (NoWorker("nobody", retry_after_s=2), openai.InternalServerError, 503, "2"),
    (WorkerLost("gone"), openai.InternalServerError, 502, None),
    (DeadlineExceeded("late"), openai.InternalServerError, 504, None),
    (ContextExceeded("full"), openai.InternalServerError, 507, None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_reach_the_client_as_their_own_kind(serve: Serve, stream: bool):
    generator = ScriptedGenerator(lambda _: [])
    async with serve(generator) as served:
        for error, raised, status, retry_after in ERRORS:
            generator.script = lambda _, error=error: [error]
            with pytest.raises(raised) as caught:
                await served.openai.chat.completions.create(**BODY, stream=stream)
            assert caught.value.status_code == status
            assert caught.value.body["message"] == str(error)
            assert caught.value.response.headers.get("retry-after") == retry_after


async def test_an_error_inside_a_stream_raises_in_the_client_after_the_text(serve: Serve, tokenizer: Tokenizer):
    first = Delta(token_ids=tokenizer.encode_prompt("Hel"))
    async with serve(ScriptedGenerator(lambda _: [first, WorkerLost("decode-1 is gone")])) as served:
        stream = await served.openai.chat.completions.create(**BODY, stream=True)
        seen = []
        with pytest.raises(openai.APIError, match="decode-1 is gone"):
            async for chunk in stream:
                seen.append(chunk.choices[0].delta.content)
    assert "".join(seen) == "Hel"


async def test_an_unknown_model_is_not_found_and_an_empty_cluster_is_unavailable(serve: Serve, tokenizer: Tokenizer):
    generator = speaker(tokenizer)
    async with serve(generator) as served:
        with pytest.raises(openai.NotFoundError, match="served: tiny"):
            await served.openai.chat.completions.create(**{**BODY, "model": "huge"})
        generator.served = ()
        with pytest.raises(openai.InternalServerError) as caught:
            await served.openai.chat.completions.create(**BODY)
        assert caught.value.response.headers["retry-after"] == "1"
        assert (await served.openai.models.list()).data == []
