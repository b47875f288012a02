"""Calls written as a Python list of function calls, as some Llama models do: ``[f(a=1), g(b="x")]``."""

import ast
import json
import warnings
from typing import Any

from gateway.text.calls.parser import CallSink


class PythonCalls:
    """Implements `CallBody`. A list is told when it is whole; one that calls an unknown name is text."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._source = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.is_broken = False

    def feed(self, char: str, sink: CallSink) -> None:
        if not self._source and (char.isspace() or sink.count):
            return
        self._source += char
        if self._source[0] != "[":
            self.is_broken = True
        elif self._ends(char):
            calls = _read(self._source, self._known)
            self._source = ""
            if calls is None:
                self.is_broken = not sink.count
                return
            for name, arguments in calls:
                sink.begin(name)
                sink.add(arguments)

    def _ends(self, char: str) -> bool:
        """Return whether this character closes the list."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "[({":
            self._depth += 1
        elif char in "])}":
            self._depth -= 1
        return self._depth == 0


_NAMES = {"true": True, "false": False, "null": None}
"""JSON's literals, which models mix into Python, and which an enforced call is written with."""


def _read(source: str, known: frozenset[str]) -> list[tuple[str, str]] | None:
    """Return (name, arguments as JSON) of each call; None if it is anything but a list of known calls with literals."""
    try:
        with warnings.catch_warnings(action="ignore"):
            # Of escapes that Python does not know.
            listed = ast.parse(source, mode="eval").body
        if not isinstance(listed, ast.List) or not listed.elts:
            return None
        return [_call(item, known, source) for item in listed.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(item: ast.expr, known: frozenset[str], source: str) -> tuple[str, str]:
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError
    name = ast.unparse(item.func)
    if name not in known:
        raise ValueError
    arguments = {keyword.arg: _literal(keyword.value, source) for keyword in item.keywords if keyword.arg}
    return name, json.dumps(arguments, ensure_ascii=False)


def _literal(node: ast.expr, source: str) -> Any:
    """Return the value of a literal of Python or JSON; raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one, source) for one in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(key, source): _literal(value, source) for key, value in pairs if key is not None}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # JSON's escapes are not all Python's: two halves of one character, and the slash.
        try:
            return json.loads(ast.get_source_segment(source, node) or "")
        except ValueError:
            return node.value
    return ast.literal_eval(node)
