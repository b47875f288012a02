"""Grammars of answers in llguidance's words: what a client asks content to look like, and what models write around it.

A grammar is a Lark text that may name others. Ordinary text never matches an added token: where a model writes one, the
grammar names its id. Pure: nothing is compiled here. Knows no request and no HTTP.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from core.errors import BadRequest

JSON_OPTIONS: Mapping[str, Any] = {
    "whitespace_pattern": r"[ \t\n\r]{0,32}",
    "lenient": False,
    "coerce_one_of": False,
}
"""Bounded space, so that no model spends its answer on it; and nothing in a schema is passed over."""
ANY_TEXT = "/(.|\\n)*/"
Literal = Sequence[str | int]
"""Text, and ids of added tokens, in order."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a part of a grammar came from, for errors."""

    param: str
    """The field that asked for it."""
    schema: Mapping[str, Any] | None = None
    """As the client wrote it, if it is a JSON schema."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the content of an answer must look like."""

    entry: Mapping[str, Any]
    """One of llguidance's grammars: `json_schema` or `lark_grammar`."""
    source: Source
    named: Sequence[Mapping[str, Any]] = ()
    """Grammars that `entry` names."""


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar of a whole answer."""

    text: str
    sources: Sequence[Source]


@dataclass(slots=True)
class Parts:
    """A Lark text that is being written: rules, and the grammars that they name by ``@``."""

    prefix: str = "g"
    """Of the names that grammars get."""
    rules: list[str] = field(default_factory=list[str])
    named: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    sources: list[Source] = field(default_factory=list[Source])

    def shape(self, shape: Shape) -> str:
        """Add the grammar of content and return how rules refer to it."""
        self.sources.append(shape.source)
        self.named += shape.named
        return self.name(shape.entry)

    def name(self, entry: Mapping[str, Any]) -> str:
        """Add a grammar and return how rules refer to it."""
        name = f"{self.prefix}{len(self.named)}"
        self.named.append({"name": name, **entry})
        return f"@{name}"

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Add a JSON schema and return how rules refer to it."""
        return self.name(schema_entry(schema))

    def grammar(self) -> AnswerGrammar:
        """Return the whole, which begins with the rule `start`."""
        main = {"name": "main", "lark_grammar": "\n".join(self.rules) + "\n"}
        return AnswerGrammar(json.dumps({"grammars": [main, *self.named]}), tuple(self.sources))


def schema_entry(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the grammar of a JSON schema under our options, whatever options it brings."""
    return {"json_schema": {**schema, "x-guidance": JSON_OPTIONS}}


def json_shape(schema: Any, param: str) -> Shape:
    """Content is JSON that fits `schema`; raises `BadRequest` for what is no schema or would be passed over."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadRequest(f"`{param}` must be a JSON schema: an object", param=param)
    lint_schema(schema, param)
    return Shape(schema_entry(schema), Source(param, schema))


def regex_shape(regex: str, param: str) -> Shape:
    """Content matches the whole of a regular expression (Rust's syntax, without look-around and references)."""
    return Shape({"lark_grammar": f"start: {regex_literal(regex)}"}, Source(param))


def choice_shape(choices: Sequence[str], param: str) -> Shape:
    """Content is one of some texts."""
    if not choices or not all(choices):
        raise BadRequest(f"`{param}` must list at least one text, and no empty one", param=param)
    return Shape({"lark_grammar": "start: " + " | ".join(map(quoted, choices))}, Source(param))


def text_grammar_shape(grammar: str, param: str) -> Shape:
    """Content fits a grammar: EBNF as llama.cpp writes it, or Lark."""
    if "::=" in grammar:
        try:
            grammar = gbnf_to_lark(grammar)
        except (GbnfToLarkError, RecursionError) as error:
            raise BadRequest(f"`{param}` is no EBNF grammar: {error}", param=param) from error
    return Shape({"lark_grammar": grammar}, Source(param))


def regex_literal(regex: str) -> str:
    """Return a regular expression as Lark writes it."""
    return f"/{llguidance.regex_to_lark(regex)}/"


def quoted(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text)


def written(literal: Literal) -> str:
    """Return a literal as Lark writes it."""
    return " ".join(quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in literal if part != "")


def tokens_apart(text: str, added: Mapping[str, int]) -> list[str | int]:
    """Return a text with the added tokens in it as ids; of two that begin at the same place, the longer one."""
    parts: list[str | int] = []
    at = begun = 0
    while at < len(text):
        found = max((name for name in added if name and text.startswith(name, at)), key=len, default="")
        if found:
            parts += [text[begun:at], added[found]]
            begun = at = at + len(found)
        else:
            at += 1
    return [part for part in (*parts, text[begun:]) if part != ""]


def thought_rules(end: Literal, begin: Literal = (), *, gap: str = "") -> list[str]:
    """Return rules, of which the first is `thought`, for an answer that reasons before anything else.

    Reasoning is free up to `end`, behind which a match of `gap` may stand. With `begin` the model opens it itself, or does
    without; else the prompt has opened it, and the end must come.
    """
    after = f" /{gap}/" if gap else ""
    if isinstance(end[0], int):
        rules = [f"inner: THOUGHT? {written(end)}{after}", f"THOUGHT: {ANY_TEXT.replace('*', '+')}"]
    else:
        rules = [f"inner: unto{after}", f"unto[lazy]: {ANY_TEXT} {written(end)}"]
    return [f"thought: ({written(begin)} inner)?" if begin else "thought: inner", *rules]


def content_grammar(shape: Shape, thought: Sequence[str] = ()) -> AnswerGrammar:
    """Return the grammar of an answer that is content alone, behind reasoning if there are rules for it."""
    parts = Parts()
    parts.rules = [f"start: {'thought ' if thought else ''}{parts.shape(shape)}", *thought]
    return parts.grammar()


def lint_schema(schema: Mapping[str, Any], where: str) -> None:
    """Raise `BadRequest` with the path of what the library would pass over without a word.

    It refuses by itself what it knows and cannot do.
    """
    for path, node in walk_schema(schema, where):
        if isinstance(node.get("items"), list):
            raise BadRequest(f"`{path}.items` is a list; write `prefixItems` instead", param=f"{path}.items")


@dataclass(frozen=True, slots=True)
class Tag:
    """Text between two marks that a trigger in free text begins."""

    begin: str
    entry: Mapping[str, Any]
    end: str
    source: Source


def tags_shape(tags: Sequence[Tag], triggers: Sequence[str], added: Mapping[str, int], param: str) -> Shape:
    """Content is free text in which every trigger begins one of `tags`."""
    parts = Parts(prefix="tag")
    names: list[str] = []
    for number, trigger in enumerate(triggers):
        opened, where = tokens_apart(trigger, added), f"{param}.triggers[{number}]"
        if len(opened) != 1:
            raise BadRequest(f"`{where}` must be plain text or one special token", param=where)
        begun = [tag for tag in tags if tag.begin.startswith(trigger)]
        if not begun:
            raise BadRequest(f"`{where}` begins none of the structures", param=where)
        ways = " | ".join(_tag_rule(tag, trigger, added, parts) for tag in begun)
        if isinstance(opened[0], str):
            parts.rules.append(f"h{number}[lazy]: {ANY_TEXT} {quoted(opened[0])}")
            parts.rules.append(f"t{number}: h{number} ({ways})")
        else:
            parts.rules.append(f"t{number}: TEXT <[{opened[0]}]> ({ways})")
        names.append(f"t{number}")
    parts.rules[:0] = [f"start: ({' | '.join(names)})* TEXT", f"TEXT: {ANY_TEXT}"]
    return Shape({"lark_grammar": "\n".join(parts.rules) + "\n"}, Source(param), tuple(parts.named))


def _tag_rule(tag: Tag, trigger: str, added: Mapping[str, int], parts: Parts) -> str:
    head = written(tokens_apart(tag.begin.removeprefix(trigger), added))
    return f"{head} {parts.name(tag.entry)} {written(tokens_apart(tag.end, added))}"


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "contains", "additionalItems")


def walk_schema(schema: Mapping[str, Any], where: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield (path, subschema) for a schema and all in it, from the outside in."""
    waiting: list[tuple[str, Any]] = [(where, schema)]
    while waiting:
        path, node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield path, node
        for key in _SINGLE:
            waiting.append((f"{path}.{key}", node.get(key)))
        for key in _LISTS:
            inner = node.get(key)
            if isinstance(inner, list):
                waiting += [(f"{path}.{key}[{i}]", one) for i, one in enumerate(inner)]
        for key in _MAPS:
            inner = node.get(key)
            if isinstance(inner, dict):
                waiting += [(f"{path}.{key}.{name}", one) for name, one in inner.items()]
