"""The known syntaxes of tool calls by name, and which one a chat template teaches its model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gateway.text.calls.json_calls import JsonCalls, MistralCalls
from gateway.text.calls.parser import CallParser
from gateway.text.calls.python_calls import PythonCalls
from gateway.text.calls.tagged_calls import TaggedCalls
from gateway.text.grammar_calls import CallGrammar, JsonCallGrammar
from gateway.text.grammar_python import PythonCallGrammar
from gateway.text.grammar_tagged import TaggedCallGrammar

Tools = Sequence[Mapping[str, Any]]
"""In OpenAI's shape."""
CallFormat = Literal["hermes", "tagged", "llama", "mistral", "pythonic"]


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One way to write calls."""

    marks: tuple[str, ...]
    """What may begin calls: shown to the parser even if they are special tokens."""
    hints: tuple[str, ...]
    """Texts in a chat template, any of which tells that it teaches this syntax."""
    open: Callable[[Tools], CallParser]
    """Returns a parser for one answer."""
    grammar: Callable[[Mapping[str, int]], CallGrammar]
    """From the ids of added tokens: how calls are enforced."""
    inner: tuple[str, ...] = ()
    """More special tokens to show."""


def _names(tools: Tools) -> frozenset[str]:
    return frozenset(str(tool["function"]["name"]) for tool in tools)


_CALL, _CALL_END, _LIST, _TAG = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
SYNTAXES: Mapping[CallFormat, CallSyntax] = {
    "tagged": CallSyntax(
        (_CALL, "<function="),
        ("<function=",),
        lambda tools: CallParser(TaggedCalls(tools), (_CALL,)),
        TaggedCallGrammar,
    ),
    "hermes": CallSyntax(
        (_CALL,),
        (_CALL,),
        lambda _: CallParser(JsonCalls(), (_CALL,)),
        partial(JsonCallGrammar, f"{_CALL}\n", f"\n{_CALL_END}\n{_CALL}\n", f"\n{_CALL_END}"),
    ),
    "mistral": CallSyntax(
        (_LIST,),
        (_LIST,),
        lambda _: CallParser(MistralCalls(), (_LIST,)),
        partial(JsonCallGrammar, f"{_LIST}[", ", ", "]"),
        ("[ARGS]", "[CALL_ID]"),
    ),
    "pythonic": CallSyntax(
        ("<|python_start|>",),
        ("<|python_start|>", "[func_name1("),
        lambda tools: CallParser(PythonCalls(_names(tools)), ("<|python_start|>",), bare="["),
        PythonCallGrammar,
    ),
    "llama": CallSyntax(
        (_TAG,),
        (_TAG, '{"name": function name, "parameters"'),
        lambda tools: CallParser(JsonCalls(_names(tools)), (_TAG,), bare="{"),
        partial(JsonCallGrammar, "", "", "", arguments="parameters"),
    ),
}
"""In the order in which templates are asked for them: the telling ones first."""


def syntax_of(template: str) -> CallSyntax | None:
    """Return the syntax that a template teaches; None: it teaches none that is known."""
    for syntax in SYNTAXES.values():
        if any(hint in template for hint in syntax.hints):
            return syntax
    return None
