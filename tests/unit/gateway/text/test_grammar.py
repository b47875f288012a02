"""Grammars of answers accept what the client asked for and nothing else, in each model's own syntax of calls."""

import json

import numpy as np
import pytest
from llguidance import LLMatcher

from core.errors import BadRequest
from engine.grammar.vocabulary import build_vocabulary
from engine.models.byte_tokenizer import write_byte_tokenizer
from gateway.text.calls.registry import SYNTAXES
from gateway.text.grammar import (
    Tag,
    choice_shape,
    content_grammar,
    json_shape,
    regex_shape,
    tags_shape,
    text_grammar_shape,
    thought_rules,
    tokens_apart,
)
from gateway.text.grammar_calls import DsmlCallGrammar, chat_grammar
from gateway.text.grammar_check import find_fault

SIZE = 330
MARK, END_THINK, BEGIN_THINK = 300, 301, 302
ADDED = {"<|mark|>": MARK, "</think>": END_THINK, "<think>": BEGIN_THINK, "<|im_end|>": 258}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, SIZE)
    return build_vocabulary(json.loads((folder / "tokenizer.json").read_text()), SIZE, (258,))


@pytest.fixture(scope="module")
def accepts(vocabulary):
    def accepts(grammar, *literal):
        """Whether the whole literal (texts, and ids of added tokens) is an answer."""
        matcher = LLMatcher(vocabulary.tokenizer, grammar.text)
        assert not matcher.is_error(), matcher.get_error()
        ids = [one for part in literal for one in (part.encode() if isinstance(part, str) else [part])]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        (json_shape(POINT, "f"), ['{"x": 1}', '{\n  "x":1\n}'], ["{}", '{"x": 1} ', '{"x": "1"}', "[]"]),
        (json_shape({"type": "object"}, "f"), ["{}", '{"a": [1]}'], ["[]", "1"]),
        (regex_shape(r"\d{2}/[a-c]+", "f"), ["12/abc"], ["1/a", "12/abcd"]),
        (choice_shape(["yes", 'n"o', "ü/\n"], "f"), ["yes", 'n"o', "ü/\n"], ["ye", "yesyes"]),
        (text_grammar_shape('root ::= "a" [0-9]+ b\nb ::= "x" | "y"', "f"), ["a12x"], ["ax", "a1"]),
        (text_grammar_shape('start: "a" NUM\nNUM: /[0-9]+/', "f"), ["a1"], ["a"]),
    ],
    ids=["json", "object", "regex", "choice", "ebnf", "lark"],
)
def test_content_has_the_form_that_was_asked_for(accepts, shape, good, bad):
    grammar = content_grammar(shape)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_no_added_token_stands_for_its_text(accepts):
    grammar = content_grammar(json_shape({"type": "string"}, "f"))
    assert accepts(grammar, '"<|im_end|> <think>"'), "spelled out it is text like any other"
    for token in (MARK, BEGIN_THINK, 256, 258):
        assert not accepts(grammar, '"', token, '"')


def test_forced_text_that_spells_a_token_is_spelled_out(vocabulary):
    # The library tokenizes forced text by itself, and would choose the token.
    for grammar in (
        content_grammar(choice_shape(["<|im_end|>b"], "f")),
        content_grammar(json_shape({"const": "<|im_end|>"}, "f")),
    ):
        matcher = LLMatcher(vocabulary.tokenizer, grammar.text)
        while not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:SIZE])
            assert allowed.max() < 256
            matcher.consume_token(int(allowed[0]))
        assert not matcher.is_error()


def test_reasoning_is_free_until_its_end(accepts):
    grammar = content_grammar(json_shape(POINT, "f"), thought_rules((END_THINK,)))
    assert accepts(grammar, "So {what}? ", END_THINK, '{"x": 1}')
    assert accepts(grammar, END_THINK, '{"x": 1}')
    assert not accepts(grammar, "Hm", END_THINK, "x")
    assert not accepts(grammar, '{"x": 1}')
    assert not accepts(grammar, "Hm", MARK, END_THINK, '{"x": 1}')


def test_a_model_that_opens_its_reasoning_itself_may_do_without(accepts):
    opened = thought_rules((END_THINK,), (BEGIN_THINK,), gap=r"[ \n]{0,4}")
    grammar = content_grammar(json_shape(POINT, "f"), opened)
    assert accepts(grammar, '{"x": 1}')
    assert accepts(grammar, BEGIN_THINK, "Hm", END_THINK, '\n\n{"x": 1}')
    assert not accepts(grammar, BEGIN_THINK, '{"x": 1}')


def test_marks_of_reasoning_may_be_plain_text(accepts):
    grammar = content_grammar(json_shape(POINT, "f"), thought_rules(("[/THINK]",), ("[THINK]",)))
    assert accepts(grammar, '[THINK]a [/ b[/THINK]{"x": 1}')
    assert not accepts(grammar, '[THINK]a{"x": 1}')


def test_structural_tags_begin_at_their_triggers_only(accepts):
    tags = [
        Tag("<f=a>", json_shape(POINT, "f").entry, "</f>", json_shape(POINT, "f").source),
        Tag("<|mark|>b", json_shape({"type": "boolean"}, "f").entry, "<|mark|>", json_shape({}, "f").source),
    ]
    grammar = content_grammar(tags_shape(tags, ["<f=", "<|mark|>"], ADDED, "f"))
    assert accepts(grammar, "free < text")
    assert accepts(grammar, 'text <f=a>{"x": 1}</f> more ', MARK, "btrue", MARK, " end")
    assert not accepts(grammar, "<f=b>")
    assert not accepts(grammar, '<f=a>{"y": 1}</f>')
    with pytest.raises(BadRequest, match="begins none"):
        tags_shape(tags, ["<g"], ADDED, "f")


def test_added_tokens_in_a_text_are_told_apart():
    assert tokens_apart("a<|mark|></think>b", ADDED) == ["a", MARK, END_THINK, "b"]
    assert tokens_apart("", ADDED) == []


# Calls.


def tool(name, strict=None, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    strictness = {} if strict is None else {"strict": strict}
    return {"type": "function", "function": {"name": name, "parameters": schema, **strictness}}


WEATHER = tool(
    "weather",
    True,
    city={"type": "string"},
    days={"type": "integer", "maximum": 9},
    unit={"type": "string", "enum": ["c", "f"]},
    code={"type": "string", "pattern": "^[A-Z]{2}$"},
)
OTHER = tool("other", a={"type": "string"})
DSML = DsmlCallGrammar(MARK, gap=" ", block="calls")
OPEN, CLOSE = ("<", MARK, " calls>\n"), ("</", MARK, " calls>")


def parameter(name, value, kind="true"):
    return ("<", MARK, f' parameter name="{name}" string="{kind}">{value}</', MARK, " parameter>\n")


def invoke(name, *parameters):
    return ("<", MARK, f' invoke name="{name}">\n', *(x for p in parameters for x in p), "</", MARK, " invoke>\n")


PARIS = invoke("weather", parameter("city", "Pa</b>ris < x"), parameter("days", "3", "false"))


def dsml(tools, choice, **more):
    return chat_grammar(tools, choice, more.pop("shape", None), DSML, lead=r"\n{0,2}", **more)


def test_a_required_call_fits_its_schema_in_the_models_own_markup(accepts):
    grammar = dsml([WEATHER, OTHER], "required")
    assert accepts(grammar, *OPEN, *PARIS, *CLOSE)
    assert accepts(grammar, "\n\n", *OPEN, *PARIS, *invoke("other", parameter("a", "")), *CLOSE)
    assert accepts(grammar, *OPEN, *invoke("weather", parameter("city", ""), parameter("unit", "f")), *CLOSE)
    quoted = parameter("code", '"FR"', "false")
    assert accepts(grammar, *OPEN, *invoke("weather", parameter("city", ""), quoted), *CLOSE)
    wrong = [
        (),
        ("text",),
        ("text", *OPEN, *PARIS, *CLOSE),
        (*OPEN, *CLOSE),
        (*OPEN, *PARIS, *CLOSE, "text"),
        (*OPEN, *invoke("nobody"), *CLOSE),
        (*OPEN, *invoke("weather"), *CLOSE),
        (*OPEN, *invoke("weather", parameter("city", ""), parameter("days", "10", "false")), *CLOSE),
        (*OPEN, *invoke("weather", parameter("city", ""), parameter("unit", "k")), *CLOSE),
        (*OPEN, *invoke("weather", parameter("city", ""), parameter("code", "FR")), *CLOSE),
        (*OPEN, *invoke("weather", parameter("city", ("x"))), *CLOSE[:1]),
    ]
    assert [literal for literal in wrong if accepts(grammar, *literal)] == []


def test_no_added_token_stands_inside_an_argument(accepts):
    grammar = dsml([WEATHER], "required")
    begun = ("<", MARK, ' invoke name="weather">\n', "<", MARK, ' parameter name="city" string="true">')
    for token in (MARK, END_THINK, 256, 258):
        assert not accepts(
            grammar, *OPEN, *begun, "Pa", token, "ris</", MARK, " parameter>\n", "</", MARK, " invoke>\n", *CLOSE
        )


def test_a_named_function_is_called_once(accepts):
    grammar = dsml([WEATHER, OTHER], {"type": "function", "function": {"name": "other"}}, is_begun=True)
    call = invoke("other", parameter("a", "b"))
    assert accepts(grammar, *call, *CLOSE)
    assert not accepts(grammar, *call, *call, *CLOSE)
    assert not accepts(grammar, *PARIS, *CLOSE)
    with pytest.raises(BadRequest, match="none of the tools"):
        dsml([OTHER], {"type": "function", "function": {"name": "nobody"}})


def test_a_strict_tool_is_followed_if_the_model_calls_it(accepts):
    grammar = dsml([WEATHER, OTHER], "auto")
    assert accepts(grammar, "Just text with < and </b>.")
    assert accepts(grammar, "First <b>\n\n", *OPEN, *PARIS, *CLOSE)
    assert not accepts(grammar, *OPEN, *invoke("weather"), *CLOSE)
    # Of a function that is not strict only the shape is kept.
    assert accepts(grammar, *OPEN, *invoke("other", parameter("z", "[1]", "false"), parameter("y", "z")), *CLOSE)
    assert not accepts(grammar, *OPEN, *invoke("other", parameter("z", "[1", "false")), *CLOSE)
    assert dsml([OTHER], "auto") is None
    assert dsml([WEATHER], "none") is None


def test_content_with_a_form_stands_beside_calls(accepts):
    grammar = dsml([OTHER], None, shape=json_shape(POINT, "f"), thought=thought_rules((END_THINK,)))
    assert accepts(grammar, "Hm", END_THINK, '{"x": 1}')
    assert accepts(grammar, END_THINK, "\n\n", *OPEN, *invoke("other"), *CLOSE)
    assert not accepts(grammar, END_THINK, "text")


ARGUMENTS = '{"city": "Paris", "days": 3}'


@pytest.mark.parametrize(
    ("syntax", "call"),
    [
        ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'),
        ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
        ("llama", f'{{"name": "weather", "parameters": {ARGUMENTS}}}'),
    ],
)
def test_other_models_calls_fit_too_and_are_read_back(accepts, syntax, call):
    made = SYNTAXES[syntax].grammar(ADDED)
    grammar = chat_grammar([WEATHER], "required", None, made)
    assert accepts(grammar, call)
    assert not accepts(grammar, call.replace("3", '"3"'))
    assert not accepts(grammar, "text")
    parser = SYNTAXES[syntax].open([WEATHER])
    _, calls = parser.push(call)
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("weather", json.loads(ARGUMENTS))]
    auto = chat_grammar([WEATHER], "auto", None, made)
    assert accepts(auto, "text") and accepts(auto, call) and accepts(auto, "")
    # What is bare makes a call only where it is first.
    assert accepts(auto, f"text {call}")
    assert not accepts(auto, call.replace("3", '"3"'))


PLACE = tool(
    "place",
    True,
    city={"type": "string"},
    days={"type": "integer", "maximum": 9},
    unit={"type": "string", "enum": ["c", "f"]},
    at={"type": "array", "items": {"type": "string"}},
)
FULL = {"city": 'Pa"ris\n</x>', "days": 3, "unit": "c", "at": ["\u00e9", "/"]}


def tagged(**values):
    lines = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<function=place>\n{lines}</function>"


def python(name="place", **values):
    return f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in values.items())})"


@pytest.mark.parametrize(
    ("syntax", "ways"),
    [
        (
            "tagged",
            {
                "full": f"<tool_call>\n{tagged(**{**FULL, 'at': json.dumps(FULL['at'], ensure_ascii=False)})}\n</tool_call>",
                "least": f"<tool_call>\n{tagged(city='x')}\n</tool_call>",
                "two": f"<tool_call>\n{tagged(city='x')}\n</tool_call>\n<tool_call>\n{tagged(city='y')}\n</tool_call>",
                "wrong": f"<tool_call>\n{tagged(city='x', days='many')}\n</tool_call>",
                "lacking": f"<tool_call>\n{tagged(days='3')}\n</tool_call>",
            },
        ),
        (
            "pythonic",
            {
                "full": f"[{python(**FULL)}]",
                "least": f"[{python(city='x')}]",
                "two": f"[{python(city='x')}, {python(city='y')}]",
                "wrong": f"[{python(city='x', days='many')}]",
                "lacking": f"[{python(days=3)}]",
            },
        ),
    ],
)
def test_calls_between_tags_and_in_python_are_enforced_and_read_back(accepts, syntax, ways):
    made = SYNTAXES[syntax].grammar(ADDED)
    expected = {"full": [FULL], "least": [{"city": "x"}], "two": [{"city": "x"}, {"city": "y"}]}
    for choice in ("required", "auto"):
        grammar = chat_grammar([PLACE, OTHER], choice, None, made)
        for way, arguments in expected.items():
            assert accepts(grammar, ways[way]), (choice, way)
            _, calls = SYNTAXES[syntax].open([PLACE, OTHER]).push(ways[way])
            assert [json.loads(one.arguments) for one in calls] == arguments
        assert not accepts(grammar, ways["wrong"])
        assert not accepts(grammar, ways["lacking"])
        assert accepts(grammar, "Text.") == (choice == "auto")
    loose = chat_grammar([PLACE, OTHER], "auto", None, made)
    other = ways["least"].replace("place", "other").replace("city", "anything")
    assert accepts(loose, other)
    single = chat_grammar([PLACE], {"type": "function", "function": {"name": "place"}}, None, made)
    assert accepts(single, ways["least"]) and not accepts(single, ways["two"])


def test_json_escapes_in_python_calls_are_jsons():
    call = r'[place(city="\ud83d\ude00 a\/b", days=-1, unit=null, at=[true, False, {"k": None}])]'
    _, (one,) = SYNTAXES["pythonic"].open([PLACE]).push(call)
    assert json.loads(one.arguments) == {"city": "😀 a/b", "days": -1, "unit": None, "at": [True, False, {"k": None}]}


def test_a_bare_string_that_must_follow_a_rule_is_refused_where_it_cannot():
    made = SYNTAXES["tagged"].grammar(ADDED)
    with pytest.raises(BadRequest, match="bare") as error:
        chat_grammar([WEATHER], "required", None, made)
    assert error.value.param == "tools[0].function.parameters.properties.code"


def test_marks_of_calls_that_are_tokens_are_written_as_tokens(accepts):
    made = SYNTAXES["hermes"].grammar({"<tool_call>": MARK, "</tool_call>": END_THINK})
    grammar = chat_grammar([WEATHER], "auto", None, made)
    call = f'\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n'
    assert accepts(grammar, "text", MARK, call, END_THINK)
    assert accepts(grammar, MARK, call, END_THINK, "\n", MARK, call, END_THINK)
    assert not accepts(grammar, MARK, "text", END_THINK)


# What is refused, and where.


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "uniqueItems": True}, "f"),
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "f.properties.a"),
        ({"anyOf": [{"type": "string"}, {"if": {"type": "string"}, "then": {"minLength": 1}}]}, "f.anyOf[1]"),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"items": {"contains": {"const": 1}}}}}, "f.$defs.d.items"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "f"),
        ({"properties": {"a": {"type": "string", "format": "nonsense"}}}, "f.properties.a"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, "f.properties.a"),
        ({"properties": {"a": {"$ref": "http://elsewhere/x"}}}, "f.properties.a"),
        (
            tool("t", None, a={"minimum": 3, "maximum": 1, "type": "integer"})["function"]["parameters"],
            "f.properties.a",
        ),
        ({"type": "objekt"}, "f"),
        ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "f"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_with_its_path(schema, path):
    found, reason = find_fault(content_grammar(json_shape(schema, "f")))
    assert found == path
    assert reason


def test_a_list_of_items_would_be_passed_over_and_is_refused():
    with pytest.raises(BadRequest, match="prefixItems") as error:
        json_shape({"properties": {"a": {"type": "array", "items": [{"type": "integer"}]}}}, "f")
    assert error.value.param == "f.properties.a.items"


def test_a_tools_schema_is_named_by_its_own_path():
    wrong = tool("wrong", True, a={"not": {}})
    path, _ = find_fault(dsml([WEATHER, wrong], "auto"))
    assert path == "tools[1].function.parameters.properties.a"


@pytest.mark.parametrize("shape", [regex_shape("(?=a)b", "f"), text_grammar_shape("start: x", "f")])
def test_other_grammars_are_refused_by_their_field(shape):
    path, reason = find_fault(content_grammar(shape))
    assert path == "f" and reason


def test_right_grammars_have_no_fault():
    assert find_fault(content_grammar(json_shape(POINT, "f"))) is None
    assert find_fault(dsml([WEATHER, OTHER], "required")) is None
