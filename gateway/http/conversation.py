"""Messages of a chat as a template wants them: roles checked, parts joined to text. Knows no tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import BadRequest
from gateway.http.schema import ContentPart, Message

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as dicts with text content; raises `BadRequest` for what is not text."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def chat_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the size of the contents, to judge what tokenizing costs."""
    return sum(len(str(message["content"])) for message in messages)


def _plain(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise BadRequest(f"`{where}.role` must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    if message.tool_calls or message.function_call:
        raise BadRequest(f"`{where}.tool_calls`: tool calls are not supported yet", param=f"{where}.tool_calls")
    if message.content is None and message.role != "assistant":
        raise BadRequest(f"`{where}.content` is required", param=f"{where}.content")
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content, f"{where}.content")}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise BadRequest(
                f"`{where}[{index}]` has the type `{part.type[:40]}`; only text is supported",
                param=f"{where}[{index}].type",
            )
        if part.text is None:
            raise BadRequest(f"`{where}[{index}].text` is required", param=f"{where}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)
