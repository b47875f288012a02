"""The request bodies of chats and completions as structs, and the strict decoding of all bodies.

Wrong types and values become `BadRequest` with the field's path; what this server cannot do is refused by name; other
unknown fields are accepted and listed for the caller to report. Knows no model and no tokenizer.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from core.errors import BadRequest
from core.request import MAX_TOP_LOGPROBS
from gateway.http.fields import HARMLESS, REFUSED

_Int31 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct, frozen=True, kw_only=True):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(Struct, frozen=True, kw_only=True):
    """Fields that all generation routes share. None always means: not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: _Int31 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[int, _Bias] | None = None
    seed: int | None = None
    priority: _Priority | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool | None = None
    timing: bool | None = None
    """Tell with the end of the answer when what happened (`gateway.timeline`)."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    """The last ten ask for a form of the answer (`gateway.http.structured`)."""


class ImageUrl(Struct, frozen=True, kw_only=True):
    """An image inside a message."""

    url: str
    detail: Literal["low", "high", "auto", "original"] | None = None


class ContentPart(Struct, frozen=True, kw_only=True):
    """One part of a message's content: a text or an image."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """What the assistant called."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call in the assistant's message of an earlier turn."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(Struct, frozen=True, kw_only=True):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None
    """Of the last message, the assistant's: go on where it ends."""
    function_call: dict[str, Any] | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled"]


class ChatBody(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Wins over `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    """A text, several texts, token ids, or several lists of token ids."""
    logprobs: _NumLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


BodyType = TypeVar("BodyType", bound=Struct)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decoded(Generic[BodyType]):
    """A decoded body and the fields in it that nobody looks at."""

    body: BodyType
    ignored: tuple[str, ...]


def decode_body(raw: bytes, kind: type[BodyType]) -> Decoded[BodyType]:
    """Decode and check one JSON body; raises `BadRequest`."""
    fields = _decode(raw, _FIELDS)
    extra = fields.keys() - _silent_fields(kind)
    if not extra:
        return Decoded(_decode(raw, _decoder(kind)), ())
    try:
        for name in sorted(extra & REFUSED.keys()):
            allowed, reason = REFUSED[name]
            if not allowed(msgspec.json.decode(fields[name])):
                raise BadRequest(f"`{name}`: {reason}; leave it out", param=name)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    return Decoded(_decode(raw, _decoder(kind)), tuple(sorted(extra - REFUSED.keys())))


_FIELDS = msgspec.json.Decoder(dict[str, Raw])


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


@cache
def _silent_fields(kind: type[Struct]) -> frozenset[str]:
    """Fields that are looked at, or mean nothing."""
    return HARMLESS.union(kind.__struct_fields__)


def peek_body(raw: bytes, kind: type[BodyType]) -> BodyType:
    """Decode some fields of a body and look at no others; raises `BadRequest`."""
    return _decode(raw, _decoder(kind))


def _decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


_AT = re.compile(r"^(?P<what>.*) - at `(?P<key>key` in `)?\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`(?: - at `\$\.?(?P<path>.*)`)?$")


def _explain(message: str) -> BadRequest:
    """Turn the decoder's words into one sentence that names the field."""
    missing = _MISSING.match(message)
    if missing:
        param = ".".join(filter(None, (missing["path"], missing["field"])))
        return BadRequest(f"`{param}` is required", param=param)
    at = _AT.match(message)
    if at is None:
        return BadRequest(f"the body must be a JSON object: {message[:1].lower()}{message[1:]}")
    what = at["what"][:1].lower() + at["what"][1:].replace("`", "")
    where = "key of " if at["key"] else ""
    return BadRequest(f"{where}`{at['path']}`: {what}", param=at["path"])
