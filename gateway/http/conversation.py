"""The messages of a chat body as formats take them: shapes checked, images set apart. Knows no model and no tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from core.errors import BadRequest
from gateway.http.ask import ChatAsk
from gateway.http.schema import ChatBody, ContentPart, Message
from gateway.text.chat import Chat, ImagePart

_ENORMOUS = 1 << 30
"""Characters that nested values are said to have which are too deep to be written down here."""


def chat_ask(body: ChatBody) -> ChatAsk:
    """Return what a chat body asks; raises `BadRequest`."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    newer = body.max_completion_tokens is not None
    return ChatAsk(
        prefix="chatcmpl",
        body=body,
        chat=read_chat(body),
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
    )


def read_chat(body: ChatBody) -> Chat:
    """Return the conversation of a body; raises `BadRequest` for what is neither text nor image."""
    images: list[ImagePart] = []
    messages = [_message(message, f"messages[{index}]", images) for index, message in enumerate(body.messages)]
    return Chat(
        messages=messages,
        images=tuple(images),
        tools=body.tools or (),
        tool_choice=body.tool_choice,
        thinking=None if body.thinking is None else body.thinking.type == "enabled",
        effort=body.reasoning_effort,
        add_generation_prompt=body.add_generation_prompt is not False,
        continues=bool(body.continue_final_message),
        variables=body.chat_template_kwargs or {},
    )


def chat_characters(chat: Chat) -> int:
    """Return the size of texts, tools and images, to judge what turning them into a prompt costs."""
    texts = sum(_characters(message) for message in chat.messages)
    return texts + _size(chat.tools) + sum(len(image.url) for image in chat.images)


def _size(value: object) -> int:
    try:
        return len(str(value))
    except RecursionError:
        return _ENORMOUS


def _characters(message: Mapping[str, Any]) -> int:
    content: str | Sequence[Mapping[str, Any]] | None = message["content"]
    if content is not None and not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    rest = (message.get("reasoning_content"), message.get("tool_calls"))
    return len(content or "") + sum(_size(value) for value in rest if value)


def _message(message: Message, where: str, images: list[ImagePart]) -> dict[str, Any]:
    if message.function_call:
        raise BadRequest(
            f"`{where}.function_call`: this form of tool calls is not supported; send `tool_calls`",
            param=f"{where}.function_call",
        )
    if message.content is None and message.role != "assistant":
        raise BadRequest(f"`{where}.content` is required", param=f"{where}.content")
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message.content, list):
        plain["content"] = [
            _part(part, f"{where}.content[{index}]", images) for index, part in enumerate(message.content)
        ]
    for name in ("name", "tool_call_id", "reasoning_content", "prefix"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    return plain


def _part(part: ContentPart, where: str, images: list[ImagePart]) -> dict[str, Any]:
    if part.type == "text":
        if part.text is None:
            raise BadRequest(f"`{where}.text` is required", param=f"{where}.text")
        return {"type": "text", "text": part.text}
    if part.type == "image_url":
        if part.image_url is None:
            raise BadRequest(f"`{where}.image_url` is required", param=f"{where}.image_url")
        images.append(ImagePart(part.image_url.url, part.image_url.detail or "auto", f"{where}.image_url"))
        return {"type": "image", "image": len(images) - 1}
    raise BadRequest(
        f"`{where}` has the type `{part.type[:40]}`; only text and image_url are supported", param=f"{where}.type"
    )
