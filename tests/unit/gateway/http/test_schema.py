import msgspec
import pytest

from core.errors import BadRequest
from gateway.http.schema import ChatBody, CompletionBody, decode_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def chat(**fields):
    return decode_body(msgspec.json.encode({**CHAT, **fields}), ChatBody)


def completion(**fields):
    return decode_body(msgspec.json.encode({**COMPLETION, **fields}), CompletionBody)


def test_explicit_nulls_mean_not_given():
    nulls = dict.fromkeys(set(ChatBody.__struct_fields__) - {"model", "messages"})
    assert chat(**nulls).body == chat().body
    nulls = dict.fromkeys(set(CompletionBody.__struct_fields__) - {"model", "prompt"})
    assert completion(**nulls).body == completion().body


def test_unknown_fields_are_listed_and_harmless_ones_are_not():
    decoded = chat(user="u", metadata={"a": 1}, service_tier="auto", zebra=1, best_guess=[1])
    assert decoded.ignored == ("best_guess", "zebra")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"model": 5}, "model"),
    ],
)
def test_a_wrong_type_or_value_names_its_field(fields, param: str):
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message
    assert "$" not in caught.value.message


@pytest.mark.parametrize(("missing", "kind"), [("messages", ChatBody), ("model", ChatBody), ("prompt", CompletionBody)])
def test_a_missing_field_is_named(missing: str, kind):
    fields = {key: value for key, value in {**CHAT, **COMPLETION}.items() if key != missing}
    with pytest.raises(BadRequest, match="is required") as caught:
        decode_body(msgspec.json.encode(fields), kind)
    assert caught.value.param == missing


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b'{"model": "m",}', b"\xff", b'{"model":"\xff"}', b"[]", b"5", b"[" * 100_000]
)
def test_what_is_not_a_json_object_is_one_plain_sentence(raw: bytes):
    with pytest.raises(BadRequest) as caught:
        decode_body(raw, ChatBody)
    assert "\n" not in caught.value.message
    assert caught.value.param is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("store", True),
        ("background", True),
        ("previous_response_id", "r"),
        ("modalities", ["audio"]),
        ("lora", "x"),
        ("prompt_logprobs", 1),
    ],
)
def test_what_cannot_be_done_yet_is_refused_by_name(field: str, value):
    with pytest.raises(BadRequest, match=f"`{field}`: .*(not|only)") as caught:
        chat(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tools", None),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("store", False),
        ("background", None),
        ("modalities", ["text"]),
    ],
)
def test_asking_for_nothing_special_is_fine(field: str, value):
    assert chat(**{field: value}).ignored == ()


@pytest.mark.parametrize("prompt", ["hi", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_a_prompt_may_be_text_texts_ids_or_lists_of_ids(prompt):
    assert completion(prompt=prompt).body.prompt == prompt


@pytest.mark.parametrize("prompt", [5, [1.5], [True], [None], [["a"]], {}])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(BadRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param.startswith("prompt")


def test_content_may_be_parts():
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    parts = chat(messages=[{"role": "user", "content": content}]).body.messages[0].content
    assert [part.type for part in parts] == ["text", "image_url"]
