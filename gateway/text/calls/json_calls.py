"""Calls written as JSON objects with a name and arguments: Hermes, Qwen, Llama 3, and Mistral's two ways."""

import json

from gateway.text.calls.parser import CallSink

_ARGUMENTS = frozenset({"arguments", "parameters"})


class JsonCall:
    """Reads one object while it grows. Arguments come out as they stand in the text; until the name is known they wait."""

    def __init__(self) -> None:
        self.name = ""
        self.is_done = False
        self.is_broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        """Of the top-level member being read; None: its key comes next."""
        self._member: list[str] = []
        """Characters of the top-level key or value being read."""
        self._fragments: list[str] = []
        self._has_arguments = False

    def feed(self, char: str) -> None:
        """Take the next character."""
        if self._in_string:
            self._string_char(char)
        elif char == '"':
            self._in_string = True
            self._keep(char)
        elif char in "{[":
            self._depth += 1
            if self._depth > 1:
                self._keep(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == 1 and char == ":":
            self._key, self._member = _decoded(self._member), []
            self.is_broken = self._key is None
        elif self._depth == 1 and char == ",":
            self._end_member()
        elif self._depth > 1 or not char.isspace():
            self._keep(char)

    def take(self) -> str:
        """Return what is new of the arguments."""
        if not self.name:
            return ""
        out = "".join(self._fragments)
        self._fragments.clear()
        return out

    def _string_char(self, char: str) -> None:
        self._keep(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._key == "name":
                self.name = _decoded(self._member) or ""

    def _close(self, char: str) -> None:
        self._depth -= 1
        if self._depth > 0:
            self._keep(char)
            return
        self._end_member()
        self.is_done = True
        self.is_broken = not self.name
        if not self._has_arguments:
            self._fragments.append("{}")

    def _keep(self, char: str) -> None:
        self._member.append(char)
        if self._key is None:
            # Between members there are only keys, which are strings.
            self.is_broken = self._member[0] != '"'
        elif self._key in _ARGUMENTS and self._member[0] in "{[":
            self._has_arguments = True
            self._fragments.append(char)

    def _end_member(self) -> None:
        if self._key in _ARGUMENTS and self._member[:1] == ['"']:
            # Some models write the arguments as a text that holds the object.
            self._has_arguments = True
            self._fragments.append(_decoded(self._member) or "{}")
        self._key, self._member = None, []


class JsonCalls:
    """Implements `CallBody`: every object is a call, whatever stands between them.

    With `known` names, an object that is first and calls none of them is text; so is one without a name.
    """

    def __init__(self, known: frozenset[str] | None = None) -> None:
        self._known = known
        self._call: JsonCall | None = None
        self._is_begun = False
        self.is_broken = False

    def feed(self, char: str, sink: CallSink) -> None:
        call = self._call
        if call is None:
            if char != "{":
                return
            call = self._call = JsonCall()
            self._is_begun = False
        call.feed(char)
        if not self._is_begun and call.name:
            self._is_begun = self._known is None or call.name in self._known
            call.is_broken = not self._is_begun
            if self._is_begun:
                sink.begin(call.name)
        if self._is_begun and (fragment := call.take()):
            sink.add(fragment)
        if call.is_done or call.is_broken:
            self.is_broken = call.is_broken and not sink.count
            self._call = None


class MistralCalls:
    """Implements `CallBody` for `[TOOL_CALLS]`: a list of objects, or a name, `[ARGS]` and the arguments, repeated."""

    _MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def __init__(self) -> None:
        self._objects: JsonCalls | None = None
        self._name = ""
        self._arguments: JsonValue | None = None
        self.is_broken = False

    def feed(self, char: str, sink: CallSink) -> None:
        if self._objects is not None:
            self._objects.feed(char, sink)
            self.is_broken = self._objects.is_broken
        elif self._arguments is not None:
            sink.add(char)
            self._arguments.feed(char)
            if self._arguments.is_done:
                self._arguments = None
        elif char == "{" and self._name:
            for mark in self._MARKS[1:]:
                self._name = self._name.partition(mark)[0]
            sink.begin(self._name.removeprefix(self._MARKS[0]).strip())
            self._name, self._arguments = "", JsonValue()
            self.feed(char, sink)
        elif not self._name and char in "[{" and not sink.count:
            self._objects = JsonCalls()
            self._objects.feed(char, sink)
        elif self._name or not char.isspace():
            self._name += char


class JsonValue:
    """Finds the end of one object."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, char: str) -> None:
        """Take the next character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0


def _decoded(member: list[str]) -> str | None:
    try:
        text = json.loads("".join(member))
    except ValueError:
        return None
    return text if isinstance(text, str) else None
