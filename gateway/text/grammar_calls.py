"""Grammars of tool calls, in each model's own syntax: which calls a request lets the model make, and how they are written.

The arguments of a function that is `strict`, or that must be called, fit its schema; of others only the shape is kept.
Pure. Knows no request and no HTTP.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from core.errors import BadRequest
from gateway.text.grammar import (
    ANY_TEXT,
    AnswerGrammar,
    Literal,
    Parts,
    Shape,
    Source,
    content_grammar,
    lint_schema,
    quoted,
    tokens_apart,
    written,
)

_GUIDED = ("enum", "const", "pattern", "format", "minLength", "maxLength")
"""Keywords of a string that raw text between marks cannot follow, or not without knowing the marks."""


@dataclass(frozen=True, slots=True)
class Function:
    """One function that may be called."""

    name: str
    schema: Mapping[str, Any] | None
    """That its arguments must fit; None: any object."""
    param: str
    """The field that declares it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request wants of calls."""

    functions: Sequence[Function]
    is_required: bool
    """There must be one."""
    is_single: bool
    """There may be one."""


def read_demand(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, *, has_shape: bool = False
) -> Demand | None:
    """Return what is to be enforced; None: nothing. Raises `BadRequest` for a choice of what is not there.

    `tools` and `choice` are OpenAI's `tools` and `tool_choice`; beside content that `has_shape`, calls have theirs.
    """
    if choice == "none" or not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("`tool_choice` asks for a call, and there are no `tools`", param="tool_choice")
        return None
    declared = [_declared(tool, f"tools[{index}].function") for index, tool in enumerate(tools)]
    if isinstance(choice, Mapping):
        wanted = cast("Mapping[str, Any]", choice.get("function") or choice).get("name")
        named = [function for function, _ in declared if function.name == wanted]
        if not named:
            raise BadRequest(f"`tool_choice` names {wanted!r}, which is none of the tools", param="tool_choice")
        return Demand(named[:1], is_required=True, is_single=True)
    if choice not in (None, "auto", "required"):
        raise BadRequest("`tool_choice` must be none, auto, required, or name a function", param="tool_choice")
    if choice == "required":
        return Demand([function for function, _ in declared], is_required=True, is_single=False)
    if has_shape or any(is_strict for _, is_strict in declared):
        functions = [function if is_strict else _loose(function) for function, is_strict in declared]
        return Demand(functions, is_required=False, is_single=False)
    return None


def _declared(tool: Mapping[str, Any], param: str) -> tuple[Function, bool]:
    function: Any = tool.get("function")
    if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
        raise BadRequest(f"`{param}.name` is required", param=f"{param}.name")
    fields = cast("dict[str, Any]", function)
    schema: Any = fields.get("parameters") or {"type": "object", "properties": {}}
    where = f"{param}.parameters"
    if not isinstance(schema, dict):
        raise BadRequest(f"`{where}` must be a JSON schema: an object", param=where)
    is_strict = fields.get("strict") is True
    if is_strict:
        lint_schema(cast("dict[str, Any]", schema), where)
    return Function(fields["name"], cast("dict[str, Any]", schema), where), is_strict


def _loose(function: Function) -> Function:
    return Function(function.name, None, function.param)


class CallGrammar(Protocol):
    """How one kind of models writes calls."""

    @property
    def begin(self) -> Literal:
        """What calls begin with, if the answer may also be a text: it tells the two apart."""
        ...

    @property
    def bare(self) -> str:
        """Without a `begin`: the character that makes an answer which begins with it one of calls."""
        ...

    def write(self, demand: Demand, parts: Parts) -> str:
        """Add the rules of the calls of `demand`; return how they go on behind `begin`."""
        ...


def chat_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    shape: Shape | None,
    syntax: CallGrammar | None,
    *,
    thought: Sequence[str] = (),
    lead: str = "",
    is_begun: bool = False,
) -> AnswerGrammar | None:
    """Return the grammar of an answer in a chat; None: it is free. Raises `BadRequest`.

    `tools` and `choice` are OpenAI's `tools` and `tool_choice`; `shape` is that of content; `syntax` is None for a model
    that calls nothing; `thought` are `thought_rules`; `lead` is a regular expression of what may stand before calls;
    `is_begun`: the prompt holds what required calls begin with.
    """
    demand = read_demand(tools, choice, has_shape=shape is not None)
    if demand is None or syntax is None:
        return None if shape is None else content_grammar(shape, thought)
    parts = Parts()
    parts.sources += [Source(function.param, function.schema) for function in demand.functions if function.schema]
    rest = syntax.write(demand, parts)
    calls = f"{written(syntax.begin)} {rest}"
    before = f"/{lead}/ " if lead else ""
    if demand.is_required:
        answer = rest if is_begun else f"{before}{calls}"
    elif shape is not None:
        answer = f"({parts.shape(shape)} | {before}{calls})"
    elif syntax.begin:
        answer = f"({_text_or(syntax.begin, calls, parts)})"
    else:
        parts.rules.append(f"PLAIN: /\\s*([^\\s\\{syntax.bare}](.|\\n)*)?/")
        answer = f"({calls} | PLAIN)"
    parts.rules = [f"start: {'thought ' if thought else ''}{answer}", *thought, *parts.rules]
    if not parts.sources:
        parts.sources.append(Source("tools"))
    return parts.grammar()


def _text_or(begin: Literal, calls: str, parts: Parts) -> str:
    """Return the rule of a text that `calls` may end."""
    first, rest = begin[0], calls.removeprefix(written(begin[:1]))
    parts.rules.append(f"TEXT: {ANY_TEXT}")
    if isinstance(first, int):
        return f"TEXT | TEXT {calls}"
    # Wherever the text reads like the beginning of calls, both ways are open if an added token decides, else only one.
    parts.rules.append(f"head[lazy]: {ANY_TEXT} {quoted(first)}")
    if len(begin) > 1:
        return f"head* TEXT | head+ {rest}"
    return f"TEXT | head {rest}"


def parameters(function: Function) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield (name, schema, whether it is required) in the schema's order; raises `BadRequest` for one that is nowhere.

    Only for a function with a schema. Definitions that the whole schema has are put into those of its parameters.
    """
    schema = cast("Mapping[str, Any]", function.schema)
    required = set(cast("list[str]", schema.get("required") or ()))
    properties = cast("Mapping[str, Any]", schema.get("properties") or {})
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if missing := required - properties.keys():
        name = min(missing)
        raise BadRequest(f"`{function.param}.required` names {name!r}, which is no property", param=function.param)
    for name, inner in properties.items():
        fields = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
        yield name, {**shared, **fields}, name in required


def raw_text(schema: Mapping[str, Any]) -> Sequence[str] | None:
    """Return what a string between marks may be: some texts, or none named for any; None if it has to follow a rule."""
    if isinstance(schema.get("enum"), list):
        return [one for one in cast("list[Any]", schema["enum"]) if isinstance(one, str)]
    return None if any(key in schema for key in _GUIDED) else ()


class JsonCallGrammar:
    """Calls as JSON objects with a name and arguments, each between two marks, or all in one list."""

    bare = "{"

    def __init__(
        self, begin: str, between: str, end: str, added: Mapping[str, int], *, arguments: str = "arguments"
    ) -> None:
        """`between` separates calls; empty: there is only ever one."""
        self.begin = tokens_apart(begin, added)
        self._between = written(tokens_apart(between, added))
        self._end = written(tokens_apart(end, added))
        self._arguments = arguments

    def write(self, demand: Demand, parts: Parts) -> str:
        bodies: list[str] = []
        for function in demand.functions:
            schema = {"type": "object"} if function.schema is None else function.schema
            head = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{self._arguments}": '
            bodies.append(f'{quoted(head)} {parts.schema(schema)} "}}"')
        parts.rules.append("call: " + " | ".join(bodies))
        more = "" if demand.is_single or not self._between else f"({self._between} call)*"
        return f"call {more} {self._end}"


class DsmlCallGrammar:
    """DeepSeek's markup: a block of invokes, each parameter between marks of its own."""

    bare = ""

    def __init__(self, mark: int, *, gap: str, block: str) -> None:
        """`mark` is the id of the token in every tag, `gap` what follows it, `block` the name of the outermost tag."""
        self.begin: Literal = ("<", mark, f"{gap}{block}>\n")
        self._mark = mark
        self._gap = gap
        self._end = written(("</", mark, f"{gap}{block}>"))

    def write(self, demand: Demand, parts: Parts) -> str:
        names = [self._invoke(number, function, parts) for number, function in enumerate(demand.functions)]
        parts.rules += [
            f"call: {' | '.join(names)}",
            f"close: {written((self._mark, f'{self._gap}parameter>' + chr(10)))}",
            # A text ends where an added token follows; "</" alone is part of it.
            f'until[lazy]: {ANY_TEXT} "</"',
        ]
        return f"call{'' if demand.is_single else '+'} {self._end}"

    def _invoke(self, number: int, function: Function, parts: Parts) -> str:
        head = written(("<", self._mark, f'{self._gap}invoke name="{function.name}">\n'))
        foot = written(("</", self._mark, f"{self._gap}invoke>\n"))
        inner = self._any_parameters(parts) if function.schema is None else self._parameters(number, function, parts)
        parts.rules.append(f"i{number}: {head} {inner} {foot}")
        return f"i{number}"

    def _open(self, name: str, *, is_text: bool) -> str:
        kind = "true" if is_text else "false"
        return written(("<", self._mark, f'{self._gap}parameter name="{name}" string="{kind}">'))

    def _any_parameters(self, parts: Parts) -> str:
        if not any(rule.startswith("loose:") for rule in parts.rules):
            opened = written(("<", self._mark, f'{self._gap}parameter name="'))
            text = f"{quoted(chr(34) + ' string=' + chr(34) + 'true' + chr(34) + '>')} until+ close"
            value = f'{quoted(chr(34) + " string=" + chr(34) + "false" + chr(34) + ">")} {parts.schema({})} "</" close'
            parts.rules.append(f'loose: {opened} /[^"<>\\n]+/ ({text} | {value})')
        return "loose*"

    def _parameters(self, number: int, function: Function, parts: Parts) -> str:
        """Return the parameters in the schema's order, those that are not required as they come or not."""
        rules: list[str] = []
        for index, (name, schema, is_required) in enumerate(parameters(function)):
            rule = f"p{number}_{index}"
            parts.rules.append(f"{rule}: {self._parameter(name, schema, parts)}")
            rules.append(rule if is_required else f"{rule}?")
        return " ".join(rules)

    def _parameter(self, name: str, schema: Mapping[str, Any], parts: Parts) -> str:
        texts = raw_text(schema) if schema.get("type") == "string" else None
        if texts is None:
            # Also a text that must follow a rule: as JSON it can be made to.
            return f'{self._open(name, is_text=False)} {parts.schema(schema)} "</" close'
        if texts:
            return f'{self._open(name, is_text=True)} ({" | ".join(map(quoted, texts))}) "</" close'
        return f"{self._open(name, is_text=True)} until+ close"
