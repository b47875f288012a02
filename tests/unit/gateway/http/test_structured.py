"""What request fields ask of an answer's form, in every server's words."""

import json

import pytest

from core.errors import BadRequest
from gateway.http.schema import CompletionBody, decode_body
from gateway.http.structured import read_shape

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def shape_of(**fields):
    body = decode_body(json.dumps({"model": "m", "prompt": "p", **fields}).encode(), CompletionBody).body
    return read_shape(body, {"<|mark|>": 300})


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "json_object": False}},
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
    ids=str,
)
def test_one_schema_in_six_ways(fields):
    shape = shape_of(**fields)
    assert shape.source.schema == SCHEMA
    assert list(shape.source.schema["properties"]) == ["b", "a"], "the order of keys is the order of the answer"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
        ({"regex": "a"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format.regex"),
        ({"structural_tag": {"structures": [{"begin": "<f>", "end": "</f>"}], "triggers": ["<f"]}}, "structural_tag"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "<|mark|>"}], "triggers": ["<|mark|>"]}},
            "response_format",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_other_forms_say_which_field_asked_for_them(fields, param):
    assert shape_of(**fields).source.param == param


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_free_text_is_no_form(fields):
    assert shape_of(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structural_tag": "{"}, "structural_tag"),
        ({"structural_tag": {"structures": [], "triggers": ["x"]}}, "structural_tag.triggers[0]"),
        ({"structural_tag": {"structures": [{"begin": "<f>"}], "triggers": ["<|mark|>f"]}}, "structural_tag.triggers[0]"),
        ({"regex": "a", "guided_json": {}}, "regex"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"regex": "x" * 300_000}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_wrong_form_is_refused_by_its_path(fields, param):
    with pytest.raises(BadRequest) as error:
        shape_of(**fields)
    assert error.value.param == param
