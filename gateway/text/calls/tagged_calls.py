"""Calls written with a tag for the function and one for each parameter, as Qwen's coder models do."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gateway.text.calls.parser import CallSink

_ANY = "any"
"""Type of a parameter whose schema names none: JSON, if it is."""
_TAG = re.compile(r"<(?P<close>/?)(?P<kind>function|parameter)(?:=(?P<name>[^>]*))?>$")


class TaggedCalls:
    """Implements `CallBody` for ``<function=f><parameter=p>value</parameter></function>``; values as schemas want them."""

    is_broken = False

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """`tools` in OpenAI's shape."""
        self._types = {tool["function"]["name"]: _types(tool["function"]) for tool in tools}
        self._buffer = ""
        self._function: str | None = None
        self._parameter: str | None = None
        self._num_parameters = 0

    def feed(self, char: str, sink: CallSink) -> None:
        self._buffer += char
        if char != ">":
            return
        tag = _TAG.search(self._buffer)
        if tag is None:
            return
        kind, is_end = tag["kind"], bool(tag["close"])
        if self._parameter is not None:
            if kind == "parameter" and is_end:
                self._end_parameter(self._buffer[: tag.start()], sink)
        elif kind == "parameter" and self._function is not None and not is_end:
            self._parameter = tag["name"] or ""
            self._buffer = ""
        elif kind == "function" and not is_end:
            name = tag["name"] or ""
            self._function, self._num_parameters, self._buffer = name, 0, ""
            sink.begin(name)
            sink.add("{")
        elif kind == "function" and self._function is not None:
            self._function, self._buffer = None, ""
            sink.add("}")

    def _end_parameter(self, value: str, sink: CallSink) -> None:
        name, self._parameter, self._buffer = self._parameter or "", None, ""
        kind = self._types.get(self._function or "", {}).get(name)
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        sink.add(f"{comma}{json.dumps(name, ensure_ascii=False)}: {_value(value, kind)}")


def _types(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = cast("Mapping[str, Any]", function.get("parameters") or {})
    properties = cast("Mapping[str, Mapping[str, Any]]", parameters.get("properties") or {})
    return {name: schema.get("type", _ANY) for name, schema in properties.items()}


def _value(text: str, kind: Any) -> str:
    """Return the value as JSON: what the schema calls a string, or is no JSON, is one."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kind not in (None, "string"):
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except ValueError:
            if text in ("True", "False", "None"):
                return {"True": "true", "False": "false", "None": "null"}[text]
    return json.dumps(text, ensure_ascii=False)
