"""Whatever JSON a chat body holds, a format takes it or refuses it as a bad request; nothing else ever escapes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import BadRequest
from gateway.generation import Delta
from gateway.http.conversation import chat_characters, read_chat
from gateway.http.schema import ChatBody, decode_body
from gateway.text.chat import TextRules
from tests.fakes.deepseek import WEATHER, data_url, load_chat, picture, write_directory
from tests.fakes.tokenizer import byte_level_definition, write_model_directory

TEXT = st.text(max_size=12) | st.sampled_from(
    ["<｜User｜>", "</think>", "｜DSML｜", "<｜image｜>", "", "\x00", "\u2028"]
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "latest_reminder", "wizard"])
PARTS = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    st.fixed_dictionaries(
        {
            "type": st.just("image_url"),
            "image_url": st.fixed_dictionaries(
                {"url": st.sampled_from([data_url(picture(9, 9)), "https://x/y"]) | TEXT}
            ),
        }
    ),
    st.fixed_dictionaries({"type": TEXT}),
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"id": TEXT, "type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}
    ),
    max_size=2,
)
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES},
    optional={
        "content": TEXT | st.lists(PARTS, max_size=3) | st.none(),
        "name": TEXT,
        "tool_call_id": TEXT,
        "tool_calls": CALLS,
        "reasoning_content": TEXT,
        "prefix": st.booleans(),
    },
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": TEXT}, optional={"parameters": JSON, "description": JSON, "strict": JSON}
        ),
    }
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, min_size=1, max_size=4)},
    optional={
        "tools": st.lists(TOOL | st.just(WEATHER) | st.dictionaries(TEXT, JSON, max_size=2), max_size=2),
        "tool_choice": st.sampled_from(["none", "auto", "required"]) | TEXT | st.dictionaries(TEXT, JSON, max_size=2),
        "thinking": st.sampled_from([{"type": "enabled"}, {"type": "disabled"}]),
        "reasoning_effort": st.sampled_from(["none", "low", "max"]) | TEXT,
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["thinking", "enable_thinking", "x"]) | TEXT, JSON, max_size=2
        ),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
    },
)


@pytest.fixture(scope="module", params=["template", "deepseek"])
def chat(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    if request.param == "template":
        return load_chat(write_model_directory(directory, byte_level_definition()))
    return load_chat(write_directory(directory))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(BODIES)
def test_a_body_is_rendered_or_refused(chat, body):
    tokenizer, form = chat
    try:
        decoded = decode_body(json.dumps({"model": "m", **body}).encode(), ChatBody).body
        asked = read_chat(decoded)
        assert chat_characters(asked) >= 0
        rendered = form.render(asked)
    except BadRequest as refusal:
        assert refusal.message
        return
    assert rendered.token_ids
    assert max(rendered.token_ids) < tokenizer.vocabulary.size
    rendered.open_answer(TextRules()).push(Delta(token_ids=rendered.token_ids[-3:]))


DEEP = b"[" * 900 + b"]" * 900


@pytest.mark.parametrize(
    ("field", "value", "put"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"x": "VALUE"}}}], DEEP),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"x": "VALUE"}}}], b"1e999"),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"x": "VALUE"}}}], b"1" * 40),
        ("tool_choice", {"x": "VALUE"}, DEEP),
        ("chat_template_kwargs", {"x": "VALUE"}, DEEP),
        ("x", "VALUE", b'"\\ud800"'),
        ("messages", [{"role": "user", "content": "VALUE"}], b'"\\ud800"'),
    ],
    ids=["deep tools", "infinite", "huge", "deep choice", "deep arguments", "half a surrogate", "half in text"],
)
def test_extreme_json_is_taken_or_refused(chat, field, value, put):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], field: value}
    raw = json.dumps(body).encode().replace(b'"VALUE"', put)
    try:
        asked = read_chat(decode_body(raw, ChatBody).body)
        assert chat_characters(asked) > 0
        assert chat[1].render(asked).token_ids
    except BadRequest as refusal:
        assert refusal.message
