"""Calls written as a Python list of function calls, as some Llama models do: ``[f(a=1), g(b="x")]``."""

import ast
import json

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


def _read(source: str, known: frozenset[str]) -> list[tuple[str, str]] | None:
    """Return (name, arguments as JSON) of each call; None if it is anything but a list of known calls with literals."""
    try:
        listed = ast.parse(source, mode="eval").body
        if not isinstance(listed, ast.List) or not listed.elts:
            return None
        return [_call(item, known) for item in listed.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(item: ast.expr, known: frozenset[str]) -> tuple[str, str]:
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError
    name = ast.unparse(item.func)
    if name not in known:
        raise ValueError
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in item.keywords if keyword.arg}
    return name, json.dumps(arguments, ensure_ascii=False)
