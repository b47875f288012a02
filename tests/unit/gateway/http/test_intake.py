"""What the cluster is asked, and what is refused before it is asked."""

import asyncio
import threading

import pytest

from gateway.generation import ServedModel
from gateway.http.config import ApiConfig
from gateway.text.tokenizer import Tokenizer
from tests.fakes.asgi import post
from tests.fakes.generator import DEFAULT_MODEL, ScriptedGenerator, obedient, play
from tests.fakes.http_api import BODY, CHAT, COMPLETIONS, MESSAGES, MINTED_SEED, build_api, call_api, speaker


async def test_every_sampling_field_reaches_the_cluster(tokenizer: Tokenizer):
    generator = speaker(tokenizer)
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -3, "6": 2.5},
        "seed": -1,
        "min_tokens": 2,
        "max_completion_tokens": 9,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "priority": -2,
        "cache_salt": "salt",
        "logprobs": True,
        "top_logprobs": 4,
    }
    headers = [(b"x-session-affinity", b"s1"), (b"x-deadline-ms", b"2500")]
    call = await call_api(tokenizer, generator, post(CHAT, {**BODY, **fields}, *headers))
    assert call.status == 200
    (prompt,) = generator.prompts
    sampling, stop = prompt.sampling, prompt.stop
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert sampling.logit_bias == {5: -3, 6: 2.5}
    assert (sampling.seed, sampling.num_logprobs) == (2**64 - 1, 4)
    assert (stop.max_tokens, stop.min_tokens, stop.stop_token_ids, stop.ignore_eos) == (9, 2, (7,), True)
    assert (prompt.priority, prompt.cache_salt, prompt.session, prompt.timeout_s) == (-2, "salt", "s1", 2.5)
    assert prompt.token_ids == tokenizer.render_chat(MESSAGES)


async def test_samples_share_request_and_seed_and_differ_by_their_index(tokenizer: Tokenizer):
    generator = speaker(tokenizer)
    await call_api(tokenizer, generator, post(CHAT, {**BODY, "n": 3}))
    assert len({prompt.request_id for prompt in generator.prompts}) == 1
    assert {prompt.sampling.seed for prompt in generator.prompts} == {MINTED_SEED}
    assert sorted(prompt.sampling.sample_index for prompt in generator.prompts) == [0, 1, 2]


async def test_a_prompt_in_a_list_is_asked_exactly_as_alone(tokenizer: Tokenizer):
    """With the same seed a batch of prompts gives each the tokens it would get alone."""
    generator = speaker(tokenizer)
    await call_api(tokenizer, generator, post(COMPLETIONS, {"model": "tiny", "prompt": ["a", "b"], "seed": 5, "n": 2}))
    asked = sorted((p.token_ids, p.sampling.seed, p.sampling.sample_index) for p in generator.prompts)
    a, b = tokenizer.encode_prompt("a"), tokenizer.encode_prompt("b")
    assert asked == sorted([(a, 5, 0), (a, 5, 1), (b, 5, 0), (b, 5, 1)])
    assert len({(p.request_id, p.sampling.sample_index) for p in generator.prompts}) == 4


async def test_usage_counts_a_prompt_once_and_its_cached_tokens_as_found_before(tokenizer: Tokenizer):
    """The second sample hits what the first computed; that is no saving for the client."""

    def script(prompt):
        return play([70, 71], cached=5 * prompt.sampling.sample_index)

    one = (await call_api(tokenizer, ScriptedGenerator(script), post(CHAT, BODY))).json["usage"]
    three = (await call_api(tokenizer, ScriptedGenerator(script), post(CHAT, {**BODY, "n": 3}))).json["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 6
    assert three["prompt_tokens_details"]["cached_tokens"] == 0


async def test_max_tokens_defaults_to_the_room_for_a_chat_and_to_16_for_a_completion(tokenizer: Tokenizer):
    generator = speaker(tokenizer)
    await call_api(tokenizer, generator, post(CHAT, BODY))
    await call_api(tokenizer, generator, post(COMPLETIONS, {"model": "tiny", "prompt": "x"}))
    room = DEFAULT_MODEL.max_tokens_total - len(tokenizer.render_chat(MESSAGES))
    assert [prompt.stop.max_tokens for prompt in generator.prompts] == [room, 16]


BAD = [
    ({"n": 200}, "n"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 300}, "stop"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop_token_ids": [400]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"max_tokens": 4096}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]}]},
        "messages[0].tool_calls",
    ),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
async def test_a_bad_chat_is_refused_before_the_cluster_is_asked(tokenizer: Tokenizer, fields: dict, param: str):
    generator = speaker(tokenizer)
    call = await call_api(tokenizer, generator, post(CHAT, {**BODY, **fields}))
    assert (call.status, call.json["error"]["param"]) == (400, param)
    assert generator.prompts == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [400]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": [70] * 4096}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ],
    ids=str,
)
async def test_a_bad_completion_is_refused_before_the_cluster_is_asked(tokenizer: Tokenizer, fields: dict, param: str):
    generator = speaker(tokenizer)
    call = await call_api(tokenizer, generator, post(COMPLETIONS, {"model": "tiny", "prompt": "x", **fields}))
    assert (call.status, call.json["error"]["param"]) == (400, param)
    assert generator.prompts == []


async def test_a_prompt_that_never_fits_is_told_in_numbers(tokenizer: Tokenizer):
    call = await call_api(tokenizer, speaker(tokenizer), post(COMPLETIONS, {"model": "tiny", "prompt": [70] * 5000}))
    error = call.json["error"]
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"]
    assert "4096" in error["message"]


async def test_unknown_fields_are_accepted_counted_and_named(tokenizer: Tokenizer):
    api, metrics = build_api(speaker(tokenizer), tokenizer)
    call = await post(CHAT, {**BODY, "zebra": 1, "apple": None, "user": "u"}).run(api)
    assert call.status == 200
    assert call.response_headers[b"x-tandem-ignored-fields"] == b"apple, zebra"
    assert b"tandem_http_ignored_fields_total 2.0" in metrics.render()


async def test_long_prompts_are_tokenized_off_the_loop_and_bounded(tokenizer: Tokenizer):
    api, _ = build_api(speaker(tokenizer), tokenizer, ApiConfig(inline_chars=10, text_threads=1, max_waiting_prompts=1))
    release = threading.Event()
    api._intake._threads.submit(release.wait)
    first = asyncio.create_task(post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 11}).run(api))
    await asyncio.sleep(0)
    short = await post(COMPLETIONS, {"model": "tiny", "prompt": "x"}).run(api)
    refused = await post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 11}).run(api)
    release.set()
    assert (short.status, refused.status, (await first).status) == (200, 429, 200)


async def test_a_served_model_bounds_ids_by_its_own_vocabulary(tokenizer: Tokenizer):
    small = ServedModel(name="tiny", max_tokens_total=64, vocab_size=100, eos_token_ids=(2,))
    generator = ScriptedGenerator(obedient([70]), [small])
    call = await call_api(tokenizer, generator, post(COMPLETIONS, {"model": "tiny", "prompt": [100]}))
    assert call.status == 400
    assert "0..99" in call.json["error"]["message"]


@pytest.mark.parametrize(
    ("only", "asked", "status"), [("tiny", "other", 404), ("tiny", "tiny", 503), ("", "other", 503), ("", "tiny", 503)]
)
async def test_a_wrong_model_is_unknown_before_any_worker_came_if_the_gateway_knows_its_own(
    tokenizer: Tokenizer, only: str, asked: str, status: int
):
    generator = ScriptedGenerator(play([]), models=())
    api, _ = build_api(generator, tokenizer, model=only)
    call = await post(CHAT, {**BODY, "model": asked}).run(api)
    assert call.status == status
