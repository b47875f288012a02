"""The bodies of Anthropic's /v1/messages and its token counter, and how they become a chat. Knows no tokens."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from core.errors import BadRequest
from gateway.http.ask import ChatAsk
from gateway.http.schema import Body
from gateway.text.chat import Chat, ImagePart

_EMPTY_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}


class ImageSource(Struct, frozen=True, kw_only=True):
    """Where a picture comes from."""

    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""


class Block(Struct, frozen=True, kw_only=True):
    """One block of a message's content; which fields count depends on `type`."""

    type: str
    text: str | None = None
    source: ImageSource | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    thinking: str | None = None


class Turn(Struct, frozen=True, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Struct, frozen=True, kw_only=True):
    """Whether and which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingMode(Struct, frozen=True, kw_only=True):
    """Whether the model reasons before it answers; a budget is taken and has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    """How much effort an answer may cost, and its form."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountBody(Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None


class MessagesBody(Body, frozen=True, kw_only=True):
    """POST /v1/messages."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None


def messages_ask(body: MessagesBody) -> ChatAsk:
    """Return what a body asks; raises `BadRequest`."""
    if (body.n or 1) > 1:
        raise BadRequest("`n`: a message is one answer; leave it out", param="n")
    if body.max_tokens is None:
        raise BadRequest("`max_tokens` is required", param="max_tokens")
    asked = msgspec.structs.replace(
        body,
        stop=body.stop_sequences or body.stop,
        response_format=body.output_config.format if body.output_config is not None else None,
    )
    return ChatAsk(
        prefix="msg",
        body=asked,
        chat=messages_chat(body),
        max_tokens=body.max_tokens,
        format_field="output_config.format",
    )


def messages_chat(body: MessagesBody | CountBody) -> Chat:
    """Return the conversation of a body; raises `BadRequest` for what is no text, image or tool of the client's."""
    writer = _Writer()
    if body.system:
        writer.messages.append({"role": "system", "content": writer.texts(body.system, "system")})
    for index, turn in enumerate(body.messages):
        writer.add(turn, f"messages[{index}]")
    choice = _choice(body.tool_choice)
    thinking = None if body.thinking is None else body.thinking.type != "disabled"
    return Chat(
        messages=writer.messages,
        images=tuple(writer.images),
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())],
        tool_choice=choice,
        thinking=thinking,
        effort=body.output_config.effort if body.output_config is not None else None,
        continues=body.messages[-1].role == "assistant",
    )


class _Writer:
    """Collects chat messages and images."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.images: list[ImagePart] = []

    def add(self, turn: Turn, where: str) -> None:
        """Append what one message becomes: results of tools are messages of their own, before the rest."""
        if isinstance(turn.content, str):
            self.messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            self.messages.append(self._assistant(turn.content, where))
        else:
            self._user(turn.role, turn.content, where)

    def texts(self, content: str | Sequence[Block], where: str) -> str | list[dict[str, Any]]:
        """Return content that may be text only."""
        if isinstance(content, str):
            return content
        for index, block in enumerate(content):
            if block.type != "text":
                raise _unknown(block, f"{where}[{index}]", "text")
        return [self._part(block, f"{where}[{index}]") for index, block in enumerate(content)]

    def _user(self, role: str, blocks: Sequence[Block], where: str) -> None:
        parts: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            at = f"{where}.content[{index}]"
            if block.type != "tool_result":
                parts.append(self._part(block, at))
                continue
            if block.tool_use_id is None:
                raise BadRequest(f"`{at}.tool_use_id` is required", param=f"{at}.tool_use_id")
            content = block.content or ""
            if not isinstance(content, str):
                content = [self._part(part, f"{at}.content[{number}]") for number, part in enumerate(content)]
            self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        if parts:
            self.messages.append({"role": role, "content": parts})

    def _assistant(self, blocks: Sequence[Block], where: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            at = f"{where}.content[{index}]"
            match block.type:
                case "text":
                    texts.append(block.text or "")
                case "thinking":
                    thoughts.append(block.thinking or "")
                case "redacted_thinking":
                    pass  # nobody can read it: it comes from another service
                case "tool_use":
                    if block.id is None or block.name is None:
                        raise BadRequest(f"`{at}` needs `id` and `name`", param=at)
                    arguments = msgspec.json.encode(block.input or {}).decode()
                    function = {"name": block.name, "arguments": arguments}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case _:
                    raise _unknown(block, at, "text, thinking and tool_use")
        if texts or not calls:
            message["content"] = "".join(texts)
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _part(self, block: Block, where: str) -> dict[str, Any]:
        if block.type == "text":
            if block.text is None:
                raise BadRequest(f"`{where}.text` is required", param=f"{where}.text")
            return {"type": "text", "text": block.text}
        if block.type == "image" and block.source is not None:
            source = block.source
            url = f"data:{source.media_type};base64,{source.data}" if source.type == "base64" else source.url
            self.images.append(ImagePart(url, "auto", f"{where}.source"))
            return {"type": "image", "image": len(self.images) - 1}
        raise _unknown(block, where, "text and image")


def _unknown(block: Block, where: str, known: str) -> BadRequest:
    return BadRequest(
        f"`{where}` has the type `{block.type[:40]}`; only {known} are supported here", param=f"{where}.type"
    )


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise BadRequest(
            f"`{where}.type`: tools that the server would run ({tool.type[:40]}) are not supported",
            param=f"{where}.type",
        )
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or _EMPTY_SCHEMA}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("`tool_choice.name` is required", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
