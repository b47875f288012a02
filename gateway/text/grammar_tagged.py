"""Grammars of calls as Qwen's coder models write them: a tag for the function and one for each parameter."""

from collections.abc import Mapping
from typing import Any

from core.errors import BadRequest
from gateway.text.grammar import ANY_TEXT, Parts, quoted, tokens_apart, written
from gateway.text.grammar_calls import Demand, Function, parameters, raw_text

_HEAD, _BETWEEN, _FOOT = "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"


class TaggedCallGrammar:
    """``<function=f>``, then ``<parameter=p>`` with a value on lines of its own; what the schema calls a string is raw."""

    bare = ""

    def __init__(self, added: Mapping[str, int]) -> None:
        """`added`: ids of added tokens."""
        self.begin = tokens_apart(_HEAD, added)
        self._between = written(tokens_apart(_BETWEEN, added))
        self._end = written(tokens_apart(_FOOT, added))

    def write(self, demand: Demand, parts: Parts) -> str:
        names = [self._function(number, function, parts) for number, function in enumerate(demand.functions)]
        parts.rules += [
            f"call: {' | '.join(names)}",
            f'until[lazy]: {ANY_TEXT} "</parameter>"',
        ]
        more = "" if demand.is_single else f" ({self._between} call)*"
        return f"call{more} {self._end}"

    def _function(self, number: int, function: Function, parts: Parts) -> str:
        inner = r"(/<parameter=[^<>\n]+>/ until /\n/)*"
        if function.schema is not None:
            rules: list[str] = []
            for index, (name, schema, is_required) in enumerate(parameters(function)):
                rule = f"p{number}_{index}"
                opened = quoted(f"<parameter={name}>\n")
                parts.rules.append(f"{rule}: {opened} {_value(function, name, schema, parts)}")
                rules.append(rule if is_required else f"{rule}?")
            inner = " ".join(rules)
        parts.rules.append(
            f"f{number}: {quoted(f'<function={function.name}>' + chr(10))} {inner} {quoted('</function>')}"
        )
        return f"f{number}"


def _value(function: Function, name: str, schema: Mapping[str, Any], parts: Parts) -> str:
    """Return a value and the end of its parameter; raises `BadRequest` for a string that has to follow a rule."""
    close = quoted("\n</parameter>\n")
    if schema.get("type") != "string":
        return f"{parts.schema(schema)} {close}"
    texts = raw_text(schema)
    if texts is None:
        where = f"{function.param}.properties.{name}"
        raise BadRequest(f"`{where}`: this model writes strings bare, where only `enum` can be enforced", param=where)
    return f"({' | '.join(map(quoted, texts))}) {close}" if texts else r"until /\n/"
