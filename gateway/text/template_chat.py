"""Chats with models that bring a chat template, and the ways in which such models write reasoning and calls of tools.

Knows the tokenizer; the template itself is rendered by it, shielded from special tokens in users' text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from core.errors import BadRequest
from core.request import MmItem
from gateway.text.calls.registry import SYNTAXES, CallFormat, CallSyntax, syntax_of
from gateway.text.chat import AnswerText, Chat, TextRules
from gateway.text.grammar import AnswerGrammar, thought_rules, tokens_apart
from gateway.text.grammar_calls import CallGrammar, chat_grammar
from gateway.text.sample import SampleText
from gateway.text.template_answer import TemplateAnswer
from gateway.text.thinking import THINK, THINK_END, Stage, ThinkingMarks, ThinkingSplitter
from gateway.text.tokenizer import Tokenizer
from gateway.text.vocabulary import Vocabulary

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_KEPT = ("name", "tool_call_id", "reasoning_content")
_MARKS = (ThinkingMarks(THINK, THINK_END), ThinkingMarks("[THINK]", "[/THINK]"))
_TAIL_TOKENS = 16
"""Enough of a prompt's end to see a mark there."""
_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that switches reasoning on or off."""


class AnswerParsing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `api.parsing` of the gateway's configuration: how answers of models with a chat template are read."""

    tool_calls: CallFormat | Literal["auto", "none"] = "auto"
    """The syntax of tool calls; `auto`: the one that the chat template teaches."""
    reasoning: Literal["auto", "none"] = "auto"
    """`auto`: text between <think> marks (or Mistral's) is reasoning, if the chat template knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    """Implements `RenderedChat`."""

    token_ids: tuple[int, ...]
    vocabulary: Vocabulary
    shown: frozenset[int]
    marks: ThinkingMarks | None
    """None: nothing of the answer is reasoning."""
    stage: Stage
    syntax: CallSyntax | None
    """None: nothing of the answer is a call."""
    tools: Sequence[Mapping[str, Any]]
    grammar: AnswerGrammar | None = None
    images: tuple[MmItem, ...] = ()

    @property
    def reasons(self) -> bool:
        return self.marks is not None

    def open_answer(self, rules: TextRules) -> AnswerText:
        if self.marks is None and self.syntax is None:
            return SampleText(
                self.vocabulary,
                stops=rules.stops,
                silent=rules.silent,
                min_tokens=rules.min_tokens,
                skip_special=rules.skip_special,
            )
        return TemplateAnswer(
            self.vocabulary,
            rules,
            splitter=ThinkingSplitter(self.marks, self.stage) if self.marks is not None else None,
            parser=self.syntax.open(self.tools) if self.syntax is not None else None,
            shown=self.shown,
        )


class TemplateChat:
    """Implements `ChatFormat` with the tokenizer's template."""

    def __init__(self, tokenizer: Tokenizer, parsing: AnswerParsing | None = None) -> None:
        parsing = parsing or AnswerParsing()
        self._tokenizer = tokenizer
        template = tokenizer.template
        source, variables = (template.source, template.variables) if template is not None else ("", frozenset[str]())
        self._marks = None
        if parsing.reasoning == "auto":
            self._marks = next((marks for marks in _MARKS if marks.end in source), None)
        self._switches = tuple(name for name in _SWITCHES if name in variables)
        self._takes_effort = "reasoning_effort" in variables
        self._syntax: CallSyntax | None = None
        if parsing.tool_calls == "auto":
            self._syntax = syntax_of(source) if "tools" in variables else None
        elif parsing.tool_calls != "none":
            self._syntax = SYNTAXES[parsing.tool_calls]
        self._calls: CallGrammar | None = None
        if self._syntax is not None:
            self._calls = self._syntax.grammar(tokenizer.added_tokens)

    @property
    def ignored_fields(self) -> frozenset[str]:
        thinking = () if self._switches else ("thinking",)
        return frozenset((*thinking, *(() if self._takes_effort else ("reasoning_effort",))))

    def render(self, chat: Chat) -> _Rendered:
        tools = self._offered(chat)
        messages = [
            _plain(message, f"messages[{index}]", takes_calls=self._syntax is not None)
            for index, message in enumerate(chat.messages)
        ]
        continues = chat.continues or bool(chat.messages[-1].get("prefix"))
        if continues and chat.messages[-1]["role"] != "assistant":
            raise BadRequest("only a message of the assistant can be continued", param="continue_final_message")
        try:
            ids = self._tokenizer.render_chat(
                messages,
                tools=tools,
                add_generation_prompt=chat.add_generation_prompt and not continues,
                continues=continues,
                variables={**self._own_variables(chat), **chat.variables},
            )
        except RecursionError:
            raise BadRequest("the template arguments are nested too deeply", param="chat_template_kwargs") from None
        stage = self._stage(ids) if self._marks is not None and not continues else Stage.ANSWER
        syntax = self._syntax if tools else None
        return _Rendered(
            token_ids=ids,
            vocabulary=self._tokenizer.vocabulary,
            shown=self._shown(syntax),
            marks=self._marks if stage is not Stage.ANSWER else None,
            stage=stage,
            syntax=syntax,
            tools=tools,
            grammar=chat_grammar(
                tools,
                chat.tool_choice,
                chat.shape,
                self._calls if syntax is not None else None,
                thought=self._thought(stage),
            ),
        )

    def _thought(self, stage: Stage) -> Sequence[str]:
        if self._marks is None or stage is Stage.ANSWER:
            return ()
        added = self._tokenizer.added_tokens
        begin = tokens_apart(self._marks.begin, added) if stage is Stage.BEFORE else ()
        return thought_rules(tokens_apart(self._marks.end, added), begin, gap=r"[ \n]{0,4}")

    def _offered(self, chat: Chat) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the prompt offers."""
        if chat.tools and self._syntax is None:
            raise BadRequest("this model's chats have no tool calls; leave `tools` out", param="tools")
        for index, tool in enumerate(chat.tools):
            function: Any = tool.get("function")
            if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
                raise BadRequest(f"`tools[{index}].function.name` is required", param=f"tools[{index}].function.name")
        return () if chat.tool_choice == "none" else chat.tools

    def _own_variables(self, chat: Chat) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if chat.thinking is not None:
            variables = dict.fromkeys(self._switches, chat.thinking)
        if chat.effort is not None and self._takes_effort:
            variables["reasoning_effort"] = chat.effort
        return variables

    def _stage(self, ids: Sequence[int]) -> Stage:
        """Return where the prompt leaves the model: templates write either mark behind the assistant's name."""
        assert self._marks is not None
        tail = self._tokenizer.decode(ids[-_TAIL_TOKENS:], skip_special=False).rstrip()
        if tail.endswith(self._marks.begin):
            return Stage.REASONING
        return Stage.ANSWER if tail.endswith(self._marks.end) else Stage.BEFORE

    def _shown(self, syntax: CallSyntax | None) -> frozenset[int]:
        texts = (*syntax.marks, *syntax.inner) if syntax is not None else ()
        if self._marks is not None:
            texts = (*texts, self._marks.begin, self._marks.end)
        added = self._tokenizer.added_tokens
        return frozenset(added[text] for text in texts if text in added)


def _plain(message: Mapping[str, Any], where: str, *, takes_calls: bool) -> dict[str, Any]:
    """Return a message as templates take it: text content, arguments of calls as values."""
    role = message["role"]
    if role not in ROLES:
        raise BadRequest(f"`{where}.role` must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    plain = {
        "role": role,
        "content": _text(message.get("content"), f"{where}.content"),
        **{name: message[name] for name in _KEPT if message.get(name) is not None},
    }
    if message.get("tool_calls"):
        if not takes_calls:
            raise BadRequest(f"`{where}.tool_calls`: this model's chats have no calls", param=f"{where}.tool_calls")
        plain["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message["tool_calls"])
        ]
    return plain


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise BadRequest(
            f"`{where}.function.arguments` is not valid JSON", param=f"{where}.function.arguments"
        ) from None
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _text(content: str | Sequence[Mapping[str, Any]] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part["type"] != "text":
            raise BadRequest(
                f"`{where}[{index}]`: this model takes no images, only text", param=f"{where}[{index}].type"
            )
    return "\n".join(cast("str", part["text"]) for part in content)
