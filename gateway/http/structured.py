"""What request fields ask of an answer's form: OpenAI's `response_format`, vLLM's and SGLang's names for the same things.

Returns a `Shape` for the chat format or the completion to be made part of a grammar. Knows no model and no workers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from core.errors import BadRequest
from gateway.http.schema import Body
from gateway.text.grammar import (
    Shape,
    Tag,
    choice_shape,
    json_shape,
    regex_shape,
    schema_entry,
    tags_shape,
    text_grammar_shape,
)

MAX_CHARS = 256 << 10
"""Of one schema, grammar or list, as JSON."""
Added = Mapping[str, int]
"""Added tokens by spelling."""


def read_shape(body: Body, added: Added, format_field: str = "response_format") -> Shape | None:
    """Return the form that a body asks for, None if it asks for none; raises `BadRequest` for two, or a wrong one.

    `format_field` is what this API calls `response_format`.
    """
    asked = [(name, value) for name in _READERS if (value := getattr(body, name)) is not None]
    params = {"response_format": format_field}
    shapes = [
        shape for name, value in asked if (shape := _READERS[name](value, params.get(name, name), added)) is not None
    ]
    if not shapes:
        return None
    if len(shapes) > 1:
        names = ", ".join(f"`{name}`" for name, _ in asked)
        raise BadRequest(f"{names} ask for the answer's form at once; send one of them", param=asked[-1][0])
    for name, value in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if value:
            raise BadRequest(f"`{name}`: an answer with a form ends when it is complete; leave it out", param=name)
    return shapes[0]


def _limited(value: Any, param: str) -> Any:
    if len(msgspec.json.encode(value)) > MAX_CHARS:
        raise BadRequest(f"`{param}` is larger than {MAX_CHARS >> 10} KiB; simplify it", param=param)
    return value


def _schema(value: Any, param: str, _added: Added) -> Shape:
    """A JSON schema, or the text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise BadRequest(f"`{param}` is not valid JSON: {error}", param=param) from None
    return json_shape(_limited(value, param), param)


def _regex(value: Any, param: str, _added: Added) -> Shape:
    return regex_shape(_text(value, param), param)


def _grammar(value: Any, param: str, _added: Added) -> Shape:
    return text_grammar_shape(_text(value, param), param)


def _choice(value: Any, param: str, _added: Added) -> Shape:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in cast("list[Any]", value)):
        raise BadRequest(f"`{param}` must be a list of texts", param=param)
    return choice_shape(cast("list[str]", _limited(value, param)), param)


def _any_object(value: Any, param: str, _added: Added) -> Shape | None:
    return json_shape({"type": "object"}, param) if value else None


def _tags(value: Any, param: str, added: Added) -> Shape:
    """OpenAI-compatible servers' `{"structures": [{begin, schema, end}], "triggers": [...]}`, or the text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise BadRequest(f"`{param}` is not valid JSON: {error}", param=param) from None
    try:
        asked = msgspec.convert(_limited(value, param), _StructuralTag)
    except msgspec.ValidationError as error:
        raise BadRequest(f"`{param}`: {str(error)[:1].lower()}{str(error)[1:]}", param=param) from None
    tags: list[Tag] = []
    for index, one in enumerate(asked.structures):
        where = f"{param}.structures[{index}].schema"
        shape = json_shape(one.schema, where)
        tags.append(Tag(one.begin, schema_entry(one.schema), one.end, shape.source))
    return tags_shape(tags, asked.triggers, added, param)


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    schema: dict[str, Any] = {}
    end: str = ""


class _StructuralTag(msgspec.Struct, frozen=True):
    structures: Sequence[_Structure]
    triggers: Sequence[str]


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"`{param}` must be a text, and not empty", param=param)
    return cast("str", _limited(value, param))


def _response_format(value: Any, param: str, added: Added) -> Shape | None:
    """`{"type": ...}` as OpenAI writes it; Responses' `text.format` has the schema beside the type."""
    if not isinstance(value, dict):
        raise BadRequest(f"`{param}` must be an object with a `type`", param=param)
    fields = cast("dict[str, Any]", value)
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_shape({"type": "object"}, param)
    if kind == "json_schema":
        inner: Any = fields.get("json_schema", fields)
        where = f"{param}.json_schema" if inner is not fields else param
        schema: Any = cast("dict[str, Any]", inner).get("schema") if isinstance(inner, dict) else None
        if schema is None:
            raise BadRequest(f"`{where}.schema` is required", param=f"{where}.schema")
        return _schema(schema, f"{where}.schema", added)
    if kind == "structural_tag":
        return _tags(fields.get("structural_tag", fields), param, added)
    if kind in ("regex", "grammar", "ebnf"):
        reader = _regex if kind == "regex" else _grammar
        return reader(fields.get("pattern", fields.get(kind)), f"{param}.{kind}", added)
    raise BadRequest(
        f"`{param}.type` must be text, json_object, json_schema, regex, grammar or structural_tag",
        param=f"{param}.type",
    )


def _structured_outputs(value: Any, param: str, added: Added) -> Shape | None:
    """Read vLLM's `{"json" | "regex" | "choice" | "grammar" | "json_object" | "structural_tag": ...}`."""
    if not isinstance(value, dict):
        raise BadRequest(f"`{param}` must be an object", param=param)
    given = [(name, one) for name, one in cast("dict[str, Any]", value).items() if one is not None and one is not False]
    known = [(name, one) for name, one in given if name in _OUTPUTS]
    if len(known) != 1:
        raise BadRequest(f"`{param}` must have exactly one of {', '.join(_OUTPUTS)}", param=param)
    name, one = known[0]
    return _OUTPUTS[name](one, f"{param}.{name}", added)


Reader = Callable[[Any, str, Added], Shape | None]
_OUTPUTS: Mapping[str, Reader] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _any_object,
    "structural_tag": _tags,
}
_READERS: Mapping[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "structural_tag": _tags,
}
"""Fields of a body that say the same thing in different servers' words."""
