"""Tool calls in each syntax: found whole, found in pieces, and not found where there are none."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.calls.registry import SYNTAXES, syntax_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
WEATHER = ("get_weather", {"city": 'Pa"ris, {好}', "days": 3})
OBJECT = json.dumps({"name": WEATHER[0], "arguments": WEATHER[1]}, ensure_ascii=False)
PARAMETERS = json.dumps({"type": "function", "name": WEATHER[0], "parameters": WEATHER[1]}, ensure_ascii=False)
ARGUMENTS = json.dumps(WEATHER[1], ensure_ascii=False)
CASES = {
    "hermes": ("hermes", f"I look.\n<tool_call>\n{OBJECT}\n</tool_call>", "I look.", [WEATHER]),
    "hermes twice": (
        "hermes",
        f'<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>{{"name": "stop"}}</tool_call>',
        "",
        [WEATHER, ("stop", {})],
    ),
    "hermes, arguments first": (
        "hermes",
        f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "get_weather"}}</tool_call>',
        "",
        [WEATHER],
    ),
    "hermes, arguments as a text": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>',
        "",
        [WEATHER],
    ),
    "hermes, other members": (
        "hermes",
        f'<tool_call>{{"id": [1, {{"name": "x"}}], "name": "get_weather", "n": null, "arguments": {ARGUMENTS}, "z": 1}}',
        "",
        [WEATHER],
    ),
    "hermes, text behind": ("hermes", f"<tool_call>{OBJECT}</tool_call> That was {{it}}.", "", [WEATHER]),
    "hermes, no object": ("hermes", "<tool_call>nothing here</tool_call>", "<tool_call>nothing here</tool_call>", []),
    "hermes, no name": ("hermes", 'So: <tool_call>{"a": 1}</tool_call> ok', 'So: <tool_call>{"a": 1}</tool_call> ok', []),
    "hermes, half a mark": ("hermes", "a < b, <tool_ca", "a < b, <tool_ca", []),
    "hermes, no call": ("hermes", "Plain {text} [1].  \n", "Plain {text} [1].  \n", []),
    "llama": ("llama", PARAMETERS, "", [WEATHER]),
    "llama, tag": ("llama", f"<|python_tag|>{PARAMETERS}; {PARAMETERS}", "", [WEATHER, WEATHER]),
    "llama, plain JSON": ("llama", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    "llama, other JSON": ("llama", ' {"a": [1, 2]} and', ' {"a": [1, 2]} and', []),
    "llama, text": ("llama", 'It is {"name": "stop"}', 'It is {"name": "stop"}', []),
    "mistral, list": ("mistral", f'Hm. [TOOL_CALLS][{OBJECT}, {{"name": "stop", "arguments": {{}}}}]', "Hm.", [WEATHER, ("stop", {})]),
    "mistral, names": ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]stop[ARGS]{{}}", "", [WEATHER, ("stop", {})]),
    "mistral, ids": ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{ARGUMENTS}", "", [WEATHER]),
    "mistral, bare": ("mistral", f"[TOOL_CALLS]get_weather{ARGUMENTS}", "", [WEATHER]),
    "pythonic": ("pythonic", "[get_weather(city='Pa\"ris, {好}', days=3), stop()]", "", [WEATHER, ("stop", {})]),
    "pythonic, mark": ("pythonic", "<|python_start|>[stop()]<|python_end|>", "", [("stop", {})]),
    "pythonic, a list": ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    "pythonic, unknown": ("pythonic", "[os.system('x')]", "[os.system('x')]", []),
    "pythonic, no literal": ("pythonic", "[stop(a=open('x'))]", "[stop(a=open('x'))]", []),
    "tagged": (
        "tagged",
        ('I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ris, {好}\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"),
        "I look.",
        [WEATHER],
    ),
    "tagged, twice": (
        "tagged",
        ("<tool_call><function=stop></function></tool_call>\n<tool_call><function=stop>"
        "<parameter=x>a > b <b></parameter></function></tool_call>"),
        "",
        [("stop", {}), ("stop", {"x": "a > b <b>"})],
    ),
}  # fmt: skip


def parse(kind: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = SYNTAXES[kind].open(TOOLS)
    text, calls = "", []
    for piece in pieces:
        passed, deltas = parser.push(piece)
        assert not (passed and calls), "text after a call"
        text += passed
        for delta in deltas:
            if delta.index == len(calls):
                calls.append((delta.name, ""))
                assert delta.name
            else:
                assert delta.index == len(calls) - 1
                assert not delta.name
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return text + parser.finish(), calls


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_and_text_is_left(case: str):
    kind, written, text, calls = CASES[case]
    for pieces in ([written], list(written)):
        found, told = parse(kind, pieces)
        assert (found, [(name, json.loads(arguments)) for name, arguments in told]) == (text, calls)


@given(st.sampled_from(sorted(CASES)), st.data())
@settings(deadline=None, max_examples=150)
def test_the_cut_of_the_text_does_not_matter(case: str, data: st.DataObject):
    kind, written, _, _ = CASES[case]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(written)))))
    pieces = [written[start:end] for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert parse(kind, pieces) == parse(kind, [written])


MARKUP = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<function=stop>", "</function>",
          "<parameter=x>", "</parameter>", "[stop()]", '{"name": "stop"', ', "arguments": {"a": [1]}', "}", "{", "[",
          "]", '"', "\\", ",", ":", "name", "stop", " ", "\n", "<", "é", "好"]  # fmt: skip


@given(st.sampled_from(sorted(SYNTAXES)), st.lists(st.sampled_from(MARKUP), max_size=14), st.data())
@settings(deadline=None, max_examples=400)
def test_no_soup_of_markup_breaks_a_parser_or_depends_on_the_cut(kind: str, words: list[str], data: st.DataObject):
    written = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=8)))
    pieces = [written[start:end] for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    whole = parse(kind, [written])
    assert parse(kind, pieces) == whole
    if not whole[1]:
        assert whole[0] == written


def test_arguments_stream_before_the_call_is_whole():
    parser = SYNTAXES["hermes"].open(TOOLS)
    assert parser.push('<tool_call>{"name": "stop", "arguments": {"a": "lo')[1][0].arguments == '{"a": "lo'
    assert parser.push("ng")[1][0].arguments == "ng"


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("<tools></tools> within <tool_call></tool_call>", "hermes"),
        ("<tool_call>\n<function=example_function_name>", "tagged"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("<|python_tag|>", "llama"),
        ("use the format [func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_a_template_tells_its_syntax(template: str, kind: str):
    assert syntax_of(template) is SYNTAXES[kind]
    assert syntax_of("no tools at all") is None
