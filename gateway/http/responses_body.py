"""The body of OpenAI's /v1/responses, and how it becomes a chat. Knows no tokens.

Nothing is stored: what refers to an earlier response or to files elsewhere is refused by name (`gateway.http.fields`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from core.errors import BadRequest
from core.request import MAX_TOP_LOGPROBS
from gateway.http.ask import ChatAsk
from gateway.http.schema import Body
from gateway.text.chat import Chat, ImagePart

_SEARCH = frozenset({"web_search", "web_search_preview"})
"""Tools of OpenAI's servers that some clients always offer: left out of the prompt, and named in the answer's header."""
_LOGPROBS = "message.output_text.logprobs"


class InputPart(Struct, frozen=True, kw_only=True):
    """One part of an item's content; which fields count depends on `type`."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None


class InputItem(Struct, frozen=True, kw_only=True):
    """One item of the input: a message, a call, its result, or reasoning of an earlier answer."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class Reasoning(Struct, frozen=True, kw_only=True):
    """How the model reasons; a summary is never written, the reasoning itself is shown."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Body, frozen=True, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


def responses_ask(body: ResponsesBody) -> ChatAsk:
    """Return what a body asks; raises `BadRequest`."""
    if (body.n or 1) > 1:
        raise BadRequest("`n`: a response is one answer; leave it out", param="n")
    writer = _Writer()
    if body.instructions:
        writer.messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        writer.messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            writer.add(item, f"input[{index}]")
        writer.end()
    tools, ignored = _tools(body.tools or ())
    wants_logprobs = _LOGPROBS in (body.include or ())
    return ChatAsk(
        prefix="resp",
        body=structs.replace(body, response_format=body.text.format if body.text is not None else None),
        chat=Chat(
            messages=writer.messages,
            images=tuple(writer.images),
            tools=tools,
            tool_choice=_choice(body.tool_choice),
            effort=body.reasoning.effort if body.reasoning is not None else None,
        ),
        max_tokens=body.max_output_tokens,
        num_logprobs=(body.top_logprobs or 0) if wants_logprobs or body.top_logprobs else -1,
        prompt_field="input",
        max_tokens_field="max_output_tokens",
        format_field="text.format",
        ignored=(*ignored, *(("max_tokens",) if body.max_tokens is not None else ())),
    )


class _Writer:
    """Collects chat messages and images. What the assistant did in one turn is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.images: list[ImagePart] = []
        self._turn: dict[str, Any] | None = None
        """The assistant's message that is still being put together."""

    def add(self, item: InputItem, where: str) -> None:
        """Take the next item."""
        match item.type:
            case "message":
                self._message(item, where)
            case "reasoning":
                thought = "".join(part.text or "" for part in item.content or () if isinstance(part, InputPart))
                thought = thought or "".join(part.text or "" for part in item.summary or ())
                if thought:
                    turn = self._assistant(begins=("content", "tool_calls"))
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case "function_call":
                if item.call_id is None or item.name is None:
                    raise BadRequest(f"`{where}` needs `call_id` and `name`", param=where)
                function = {"name": item.name, "arguments": item.arguments or "{}"}
                calls = self._assistant().setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise BadRequest(f"`{where}` needs `call_id` and `output`", param=where)
                self.end()
                content = self._content(item.output, f"{where}.output")
                self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case _:
                raise BadRequest(
                    f"`{where}` has the type `{item.type[:40]}`; only message, reasoning, function_call and "
                    "function_call_output are supported",
                    param=f"{where}.type",
                )

    def end(self) -> None:
        """Finish the assistant's message."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self.messages.append({"content": None if "tool_calls" in turn else "", **turn})

    def _assistant(self, begins: Sequence[str] = ()) -> dict[str, Any]:
        """Return the open message of the assistant, a fresh one if it has any of `begins` already."""
        if self._turn is not None and any(name in self._turn for name in begins):
            self.end()
        if self._turn is None:
            self._turn = {"role": "assistant"}
        return self._turn

    def _message(self, item: InputItem, where: str) -> None:
        if item.role is None or item.content is None:
            raise BadRequest(f"`{where}` needs `role` and `content`", param=where)
        content = self._content(item.content, f"{where}.content")
        if item.role != "assistant":
            self.end()
            self.messages.append({"role": item.role, "content": content})
            return
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        turn = self._assistant(begins=("tool_calls",))
        turn["content"] = f"{turn['content']}\n\n{content}" if "content" in turn else content

    def _content(self, content: str | Sequence[InputPart], where: str) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content
        return [self._part(part, f"{where}[{index}]") for index, part in enumerate(content)]

    def _part(self, part: InputPart, where: str) -> dict[str, Any]:
        if part.type in ("input_text", "output_text", "text"):
            if part.text is None:
                raise BadRequest(f"`{where}.text` is required", param=f"{where}.text")
            return {"type": "text", "text": part.text}
        if part.type == "refusal":
            return {"type": "text", "text": part.refusal or ""}
        if part.type == "input_image" and part.image_url is not None:
            self.images.append(ImagePart(part.image_url, part.detail or "auto", f"{where}.image_url"))
            return {"type": "image", "image": len(self.images) - 1}
        raise BadRequest(
            f"`{where}` has the type `{part.type[:40]}`; only text, and images with `image_url`, are supported",
            param=f"{where}.type",
        )


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return function tools in the shape of chats, and what was left out."""
    functions: list[dict[str, Any]] = []
    ignored: list[str] = []
    for index, tool in enumerate(tools):
        kind, where = tool.get("type"), f"tools[{index}]"
        if kind == "function":
            if not isinstance(tool.get("name"), str):
                raise BadRequest(f"`{where}.name` is required", param=f"{where}.name")
            functions.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
        elif kind in _SEARCH:
            ignored.append(f"{where}.{kind}")
        else:
            raise BadRequest(
                f"`{where}.type`: only tools of the type function are supported, not {str(kind)[:40]}",
                param=f"{where}.type",
            )
    return functions, tuple(ignored)


def _choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice if choice is None or isinstance(choice, str) else dict(choice)
