"""Chats with models that bring a chat template: text in, text out.

Knows the tokenizer; the template itself is rendered by it, shielded from special tokens in users' text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from core.errors import BadRequest
from core.request import MmItem
from gateway.text.chat import AnswerText, Chat, TextRules
from gateway.text.sample import SampleText
from gateway.text.tokenizer import Tokenizer
from gateway.text.vocabulary import Vocabulary

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_KEPT = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class _Rendered:
    """Implements `RenderedChat`."""

    token_ids: tuple[int, ...]
    vocabulary: Vocabulary
    images: tuple[MmItem, ...] = ()
    reasons: bool = False

    def open_answer(self, rules: TextRules) -> AnswerText:
        return SampleText(
            self.vocabulary,
            stops=rules.stops,
            silent=rules.silent,
            min_tokens=rules.min_tokens,
            skip_special=rules.skip_special,
        )


class TemplateChat:
    """Implements `ChatFormat` with the tokenizer's template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def ignored_fields(self) -> frozenset[str]:
        return frozenset({"thinking", "reasoning_effort"})

    def render(self, chat: Chat) -> _Rendered:
        if chat.tools:
            raise BadRequest("this model's chats have no tool calls; leave `tools` out", param="tools")
        if chat.tool_choice not in (None, "none", "auto"):
            raise BadRequest("this model's chats have no tool calls; leave `tool_choice` out", param="tool_choice")
        if chat.continues:
            raise BadRequest(
                "this model's chats cannot continue a message; leave `continue_final_message` out",
                param="continue_final_message",
            )
        messages = [_plain(message, f"messages[{index}]") for index, message in enumerate(chat.messages)]
        try:
            ids = self._tokenizer.render_chat(
                messages, add_generation_prompt=chat.add_generation_prompt, variables=chat.variables
            )
        except RecursionError:
            raise BadRequest("the template arguments are nested too deeply", param="chat_template_kwargs") from None
        return _Rendered(ids, self._tokenizer.vocabulary)


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message with text content only."""
    role = message["role"]
    if role not in ROLES:
        raise BadRequest(f"`{where}.role` must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    for name in ("tool_calls", "prefix"):
        if message.get(name):
            raise BadRequest(f"`{where}.{name}`: this model's chats have no such thing", param=f"{where}.{name}")
    content = message.get("content")
    return {
        "role": role,
        "content": _text(content, f"{where}.content"),
        **{name: message[name] for name in _KEPT if message.get(name) is not None},
    }


def _text(content: str | Sequence[Mapping[str, Any]] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part["type"] != "text":
            raise BadRequest(
                f"`{where}[{index}]`: this model takes no images, only text", param=f"{where}[{index}].type"
            )
    return "\n".join(cast("str", part["text"]) for part in content)
