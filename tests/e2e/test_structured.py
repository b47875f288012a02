"""Structured output through whole clusters: every text fits, nothing slips into it, and nobody else waits for it."""

import json

import httpx
import jsonschema
import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.models.scripted_v41 import NAME as V41
from tests.fakes.audit import statistics
from tests.fakes.killed_stream import stream_past_a_kill
from tests.fakes.live_cluster import complete, running_cluster

pytestmark = [pytest.mark.cluster]

MODEL = "tiny-llama-f64"


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=99)
    likes: list[bool] = pydantic.Field(max_length=3)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("--prefill", "1", "--decode", "2", "--set", "all:engine.audit_every_steps=1")
    with running_cluster(tmp_path_factory.mktemp("structured"), *flags, model=MODEL) as running:
        yield running


@pytest.fixture(scope="module")
def url(cluster):
    return cluster.base_url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def body(**fields):
    return {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "temperature": 1, "seed": 5, **fields}


def text_of(url, **fields):
    answer = complete(url, body(**fields))
    assert "choices" in answer, answer
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return answer["choices"][0]["text"]


def error_of(url, **fields):
    reply = httpx.post(f"{url}/v1/completions", json=body(**fields), timeout=60)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_schema_is_followed_whatever_it_is_called(url, fields):
    # One request in four words: the same tokens are chosen.
    text = text_of(url, **fields)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == text_of(url, response_format=FORMAT)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"regex": "[ab]{2,5}x"}, lambda text: text.strip("ab") == "x"),
        ({"guided_regex": "[0-9]{3}"}, str.isdigit),
        ({"guided_choice": ["red", "grün"]}, {"red", "grün"}.__contains__),
        ({"ebnf": 'root ::= "a" [0-9]{2} b\nb ::= "x" | "y"'}, lambda text: text[0] == "a" and text[3] in "xy"),
        ({"guided_grammar": 'start: "q" /[0-9]{2}/'}, lambda text: text[1:].isdigit()),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_forms_are_followed(url, fields, fits):
    assert fits(text_of(url, **fields))


def test_the_public_client_parses_what_it_asked_for(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Who?"}], response_format=Person, max_tokens=400, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    response = client.responses.parse(
        model=MODEL, input="Who?", text_format=Person, max_output_tokens=400, temperature=1
    )
    assert isinstance(response.output_parsed, Person)
    loose = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Who?"}],
        response_format={"type": "json_object"},
        max_tokens=300,
        seed=1,
    )
    if loose.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(loose.choices[0].message.content), dict)


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-99, 99),
        st.integers(0, 99),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.builds(lambda most: {"type": "string", "pattern": "^[a-f]+$", "maxLength": most}, st.integers(1, 6)),
    st.just({"type": "string", "format": "date"}),
    st.lists(st.sampled_from(["a", 1, None, "é", 'x"y']), min_size=1, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
)


def nested(inner):
    def closed(fields):
        properties = {f"k{i}": schema for i, schema in enumerate(fields)}
        return {
            "type": "object", "properties": properties, "required": list(properties)[::2], "additionalProperties": False,
        }  # fmt: skip

    return st.one_of(
        st.lists(inner, max_size=3).map(closed),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda ways: {"anyOf": ways}),
        st.tuples(inner, inner).map(
            lambda ways: {"type": "array", "prefixItems": list(ways), "items": False, "minItems": 2}
        ),
    )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(schema=st.recursive(SCALARS, nested, max_leaves=5), seed=st.integers(0, 2**31))
def test_every_schema_is_followed_through_both_workers(url, schema, seed):
    answer = complete(url, body(guided_json={"anyOf": [schema]}, seed=seed, temperature=1.5))
    assert "choices" in answer, answer
    if answer["choices"][0]["finish_reason"] == "stop":
        jsonschema.validate(json.loads(answer["choices"][0]["text"]), schema)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"guided_json": {"properties": {"a": {"uniqueItems": True}}}}, "guided_json.properties.a", "uniqueItems"),
        ({"guided_json": {"items": [{}]}}, "guided_json.items", "prefixItems"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema", "required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"regex": "(?=a)"}, "regex", "regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "one of them"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "leave it out"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "256 KiB"),
        ({"ebnf": "root ::= ("}, "ebnf", "EBNF"),
        ({"structural_tag": {"structures": []}}, "structural_tag", "triggers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_path(url, fields, param, says):
    error = error_of(url, **fields)
    assert error["param"] == param
    assert says in error["message"]


def test_no_special_token_enters_a_text(cluster, url):
    # A bias that asks for them as loudly as possible, and texts that spell them.
    biased = {str(token): 100 for token in (256, 257, 258, 300)}
    text = text_of(url, guided_json=SCHEMA, logit_bias=biased, skip_special_tokens=False)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert "<|" not in text
    spelled = text_of(url, guided_choice=["<|im_end|><|im_start|>system"], skip_special_tokens=False, logprobs=0)
    assert spelled == "<|im_end|><|im_start|>system"


def test_a_stream_says_the_same_and_survives_the_loss_of_its_worker(cluster, url):
    schema = {"type": "array", "items": SCHEMA, "minItems": 6, "maxItems": 6}
    request = body(guided_json=schema, max_tokens=1000, seed=11)
    whole = complete(url, request)["choices"][0]["text"]
    jsonschema.validate(json.loads(whole), schema)
    assert stream_past_a_kill(cluster, request, whole, begun=21)["finish"] == "stop"
    cluster.wait_ready(4)


def test_metrics_count_grammars(cluster, url):
    text_of(url, guided_choice=["a", "b"])
    found = statistics(cluster)
    for role in ("prefill", "decode"):
        values = [one.values for name, one in found.items() if name.startswith(role)]
        assert sum(one["engine_grammar_masks"] for one in values) >= 1
        assert sum(one["engine_grammar_compiled"] for one in values) >= 1
        assert sum(one["engine_grammar_failed"] for one in values) == 0
    assert [text for one in found.values() for text in one.audit_findings] == []


# DeepSeek's format: reasoning, and calls in its own markup.

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_traffic")
]  # fmt: skip


@pytest.fixture(scope="module")
def v41(tmp_path_factory):
    with (
        running_cluster(tmp_path_factory.mktemp("v41"), model=V41) as running,
        openai.OpenAI(base_url=running.base_url + "/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_forced_call_fits_its_schema(v41, thinking, named):
    choice = {"type": "function", "function": {"name": "get_traffic"}} if named else "required"
    answer = v41.chat.completions.create(
        model=V41,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=400,
        temperature=0,
        extra_body={"thinking": {"type": "enabled" if thinking else "disabled"}},
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls", answer
    assert bool(getattr(message, "reasoning_content", None)) == thinking
    for call in message.tool_calls:
        assert call.function.name == "get_traffic" if named else call.function.name.startswith("get_")
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
    assert len(message.tool_calls) == 1 or not named


def test_json_comes_behind_reasoning(v41):
    answer = v41.chat.completions.create(
        model=V41,
        messages=[{"role": "user", "content": "Say hello."}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        max_tokens=1500,
        temperature=0,
    )
    message = answer.choices[0].message
    assert message.reasoning_content == "A greeting is wanted."
    jsonschema.validate(json.loads(message.content), SCHEMA)
