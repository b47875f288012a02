"""Scripts of the official SDKs through a whole cluster: conversation, tools, vision and streams in every API."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from engine.models.scripted_v41 import (
    GREETING,
    GREETING_ANSWER,
    GREETING_REASONING,
    NAME,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_REASONING,
    WEATHER_RESULT,
    prepare_scripted_v41,
)
from tests.fakes import bare_client
from tests.fakes.audit import held_pages
from tests.fakes.deepseek import ARGUMENTS, WEATHER
from tests.fakes.live_cluster import running_cluster, wait_for
from tests.fakes.streams import MESSAGES, RESPONSES, tools_of

pytestmark = [pytest.mark.cluster]

ASKED = [{"role": "user", "content": WEATHER_QUESTION}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("sdks"), model=NAME) as running:
        yield running


@pytest.fixture(scope="module")
def gpt(cluster):
    with openai.OpenAI(base_url=cluster.base_url + "/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture(scope="module")
def claude(cluster):
    with anthropic.Anthropic(base_url=cluster.base_url, api_key="none", max_retries=0, timeout=30) as made:
        yield made


def respond(gpt, **more):
    return gpt.responses.create(model=NAME, temperature=0, store=False, **more)


def test_a_response_has_reasoning_text_and_usage(gpt):
    answer = respond(gpt, input=GREETING)
    reasoning, message = answer.output
    assert (reasoning.content[0].text, answer.output_text) == (GREETING_REASONING, GREETING_ANSWER)
    assert (answer.status, message.status) == ("completed", "completed")
    usage = answer.usage
    assert usage.output_tokens == len(GREETING_REASONING) + 1 + len(GREETING_ANSWER) + 1
    assert usage.output_tokens_details.reasoning_tokens == len(GREETING_REASONING) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_response_streams_what_it_would_answer(gpt):
    with gpt.responses.stream(model=NAME, temperature=0, store=False, input=GREETING) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert (thoughts, deltas) == (GREETING_REASONING, GREETING_ANSWER)
    assert final.output_text == GREETING_ANSWER
    assert [event.type for event in events].count("response.completed") == 1
    assert final.usage.output_tokens == respond(gpt, input=GREETING).usage.output_tokens


def test_a_response_calls_a_tool_and_goes_on(gpt):
    tools = tools_of(RESPONSES, WEATHER)["tools"]
    first = respond(gpt, input=ASKED, tools=tools)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}
    items = [item.model_dump(exclude_none=True) for item in first.output]
    second = respond(gpt, input=[*ASKED, *items, result], tools=tools)
    assert second.output_text == WEATHER_ANSWER
    assert second.usage.input_tokens_details.cached_tokens > 0
    with gpt.responses.stream(model=NAME, temperature=0, store=False, input=ASKED, tools=tools) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [ARGUMENTS]


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"background": True}])
def test_a_response_that_needs_a_store_is_refused(gpt, field):
    with pytest.raises(openai.BadRequestError) as error:
        respond(gpt, input=GREETING, **field)
    assert error.value.param in field


def say(claude, messages=None, **more):
    asked = messages or [{"role": "user", "content": GREETING}]
    return claude.messages.create(model=NAME, max_tokens=500, messages=asked, extra_body={"temperature": 0}, **more)


def test_a_message_has_thinking_text_and_usage(claude):
    answer = say(claude)
    thinking, text = answer.content
    assert (thinking.thinking, text.text) == (GREETING_REASONING, GREETING_ANSWER)
    assert (answer.stop_reason, answer.role, answer.type) == ("end_turn", "assistant", "message")
    assert answer.usage.output_tokens == len(GREETING_REASONING) + 1 + len(GREETING_ANSWER) + 1


def test_counted_tokens_are_the_input_of_the_message(claude):
    messages = [{"role": "user", "content": GREETING}]
    counted = claude.messages.count_tokens(model=NAME, messages=messages, system="Be kind.")
    usage = say(claude, messages, system="Be kind.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_message_streams_what_it_would_answer(claude):
    asked = [{"role": "user", "content": GREETING}]
    with claude.messages.stream(model=NAME, max_tokens=500, messages=asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == GREETING_ANSWER
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.usage.output_tokens == say(claude).usage.output_tokens


def test_a_message_calls_a_tool_and_goes_on(claude):
    tools = tools_of(MESSAGES, WEATHER)["tools"]
    first = say(claude, ASKED, tools=tools)
    assert first.stop_reason == "tool_use"
    thinking, call = first.content
    assert (thinking.thinking, call.name, call.input) == (WEATHER_REASONING, "get_weather", ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER_RESULT}
    messages = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = say(claude, messages, tools=tools)
    assert second.content[-1].text == WEATHER_ANSWER
    assert second.usage.cache_read_input_tokens > 0
    with claude.messages.stream(model=NAME, max_tokens=500, messages=ASKED, tools=tools) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[-1].input) == ("tool_use", ARGUMENTS)


def test_stop_sequences_and_limits_are_told_as_such(claude):
    stopped = say(claude, stop_sequences=["scripted"], thinking={"type": "disabled"})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "scripted")
    assert stopped.content[0].text == "Hello from the "
    cut = claude.messages.create(model=NAME, max_tokens=3, messages=[{"role": "user", "content": GREETING}])
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


def test_errors_have_anthropics_shape(claude):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="gpt-4", max_tokens=3, messages=[{"role": "user", "content": "hi"}])
    assert unknown.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="takes no images"):
        say(claude, [{"role": "user", "content": [image]}])


@pytest.mark.timeout(500)
def test_sglangs_benchmark_client_finishes_and_counts_as_we_do(cluster, tmp_path):
    """Its Python client: polls /v1/models, sends no `stream_options` of its own, opens a connection per request."""
    if importlib.util.find_spec("sglang") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("sglang is not installed; make setup-dev installs it")
    out = tmp_path / "out.jsonl"
    flags = {
        "--backend": "vllm-chat",
        "--base-url": cluster.base_url,
        "--model": NAME,
        "--tokenizer": str(prepare_scripted_v41(tmp_path)),
        "--dataset-name": "random-ids",
        "--random-input-len": "60",
        "--random-output-len": "12",
        "--random-range-ratio": "1.0",
        "--num-prompts": "12",
        "--max-concurrency": "4",
        "--output-file": str(out),
        "--extra-request-body": json.dumps({"stream_options": {"include_usage": True}}),
    }
    script = Path(bare_client.__file__)
    before = counted(cluster)
    run = subprocess.run(
        [sys.executable, str(script), "sglang", *(part for pair in flags.items() for part in pair), "--output-details"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(out.read_text().splitlines()[-1])
    assert (told["completed"], [error for error in told["errors"] if error]) == (12, [])
    assert told["total_output_tokens"] == 12 * 12
    # It sends one request more to warm up.
    assert counted(cluster) - before == 13 * 12


def counted(cluster) -> int:
    """Output tokens that the gateway has told in usage so far."""
    metrics = httpx.get(cluster.base_url + "/metrics", timeout=60).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("tandem_http_completion_tokens_total ")]
    return int(float(line.split()[1]))


def test_nothing_is_held_afterwards(cluster, claude):
    say(claude)
    wait_for(lambda: held_pages(cluster) == 0, 60, "pages are still held")


def test_the_timing_extension_splits_the_time_to_the_first_token(gpt):
    """What a benchmark needs: queue, routing, prefill, hand-over, in one clock, and who did it."""
    messages = [{"role": "user", "content": GREETING}]
    answer = gpt.chat.completions.create(model=NAME, messages=messages, temperature=0, extra_body={"timing": True})
    (timing,) = answer.timing
    times = [
        timing[name] for name in ("arrived", "tokenized", "admitted", "submitted", "prompt_computed", "first_token")
    ]
    assert times == sorted(times)
    assert timing["first_token"] <= timing["last_token"]
    assert (timing["attempts"], timing["decode_worker"][:6]) == (1, "decode")
    assert timing["cached_tokens"] == answer.usage.prompt_tokens_details.cached_tokens
