"""The words of OpenAI's /v1/responses: numbered events of items that open and close, and the whole response.

A whole response is what a stream's last event says: both come from the same items. Knows no HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from core.handover import TokenLogprobs
from gateway.http.answer import Choice, Usage
from gateway.http.errors import HttpFault
from gateway.http.keepalive import COMMENT
from gateway.http.logprobs import chat_entries
from gateway.http.responses_body import ResponsesBody
from gateway.http.sse import json_bytes, named_event
from gateway.text.piece import CallDelta, Piece
from gateway.text.vocabulary import Vocabulary

_Kind = Literal["message", "reasoning", "function_call"]
_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTA = {
    "message": b"response.output_text.delta",
    "reasoning": b"response.reasoning_text.delta",
    "function_call": b"response.function_call_arguments.delta",
}
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


@dataclass(slots=True)
class _Item:
    """One item of the output while it grows."""

    kind: _Kind
    id: str
    index: int
    call: CallDelta | None = None
    parts: list[str] = field(default_factory=list[str])
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    head: bytes = b""
    """Of a delta event, up to the text."""

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def content(self, *, is_done: bool) -> dict[str, Any]:
        """Return its one part."""
        text = self.text if is_done else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if is_done else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def to_plain(self, status: str) -> dict[str, Any]:
        """Return the item as clients read it; `in_progress` is one that is still empty."""
        is_done = status != "in_progress"
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            arguments = self.text if is_done else ""
            return {**head, "call_id": self.call.id, "name": self.call.name, "arguments": arguments}
        content = [self.content(is_done=True)] if is_done else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class ResponsesAnswer:
    """Implements `AnswerFormat` for one response. Items come in the order of pieces: reasoning, message, calls."""

    def __init__(
        self,
        body: ResponsesBody,
        *,
        answer_id: str,
        model: str,
        created: int,
        vocabulary: Vocabulary,
        with_logprobs: bool,
    ) -> None:
        """`created` in Unix seconds."""
        self._echo = _echo(body)
        self._id = answer_id
        self._model = model
        self._created = created
        self._vocabulary = vocabulary
        self._with_logprobs = with_logprobs
        self._sequence = 0
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._statuses: list[str] = []
        self._ending = ""

    keepalive = COMMENT

    def opening(self, index: int, usage: Usage) -> bytes:
        del index, usage
        begun = self._response("in_progress", None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        del index, usage
        out = b""
        if piece.reasoning:
            out = self._grow("reasoning", piece.reasoning)
        if piece.text or (piece.logprobs and self._with_logprobs):
            out += self._grow("message", piece.text, piece.logprobs)
        for call in piece.calls:
            out += self._grow_call(call)
        if piece.ending is not None:
            self._ending = piece.ending
            out += self._close("incomplete" if piece.ending == "length" else "completed")
        return out

    def closing(self, usage: Usage) -> bytes:
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status, usage))

    def failure(self, fault: HttpFault, usage: Usage) -> bytes:
        out = self._close("incomplete")
        fallback = "server_error" if fault.status >= 500 else "invalid_prompt"
        error = {"code": _ERROR_CODES.get(fault.status, fallback), "message": fault.message}
        return out + self._event("response.failed", response={**self._response("failed", usage), "error": error})

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        if thought := "".join(choice.reasoning):
            self._grow("reasoning", thought)
        if choice.text or (choice.logprobs and self._with_logprobs):
            self._grow("message", choice.text, choice.logprobs)
        for index, call in choice.calls.items():
            self._grow_call(CallDelta(index, "".join(call.arguments), call.id, call.name))
        assert choice.finish is not None
        self._ending = choice.finish
        status = self._status()
        self._close(status)
        return json_bytes(self._response(status, usage))

    def _status(self) -> str:
        return "incomplete" if self._ending == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_event(kind.encode(), json_bytes(body))

    def _grow(self, kind: _Kind, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        out, item = b"", self._open
        if item is None or item.kind != kind:
            out = self._begin(kind)
            item = self._items[-1]
        item.parts.append(text)
        tail = b"}\n\n"
        if kind == "message":
            entries = chat_entries(self._vocabulary, logprobs) if self._with_logprobs else []
            item.logprobs += entries
            tail = b',"logprobs":' + json_bytes(entries) + tail
        out += item.head + json_bytes(text) + b',"sequence_number":%d' % self._sequence + tail
        self._sequence += 1
        return out

    def _grow_call(self, delta: CallDelta) -> bytes:
        out, item = b"", self._open
        if item is None or item.call is None or item.call.index != delta.index:
            out = self._begin("function_call", delta)
            item = self._items[-1]
        if not delta.arguments:
            return out
        item.parts.append(delta.arguments)
        out += item.head + json_bytes(delta.arguments) + b',"sequence_number":%d}\n\n' % self._sequence
        self._sequence += 1
        return out

    def _begin(self, kind: _Kind, call: CallDelta | None = None) -> bytes:
        out = self._close("completed")
        number = len(self._items)
        item = _Item(kind, f"{_PREFIX[kind]}_{self._id}_{number}", number, call)
        delta, place = _DELTA[kind], b"" if kind == "function_call" else b'"content_index":0,'
        item.head = b'event: %b\ndata: {"type":"%b","item_id":%b,"output_index":%d,%b"delta":' % (
            *(delta, delta, json_bytes(item.id), number, place),
        )
        self._items.append(item)
        self._open = item
        out += self._event("response.output_item.added", output_index=number, item=item.to_plain("in_progress"))
        if kind != "function_call":
            out += self._event("response.content_part.added", **self._at(item), part=item.content(is_done=False))
        return out

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        self._statuses.append(status)
        if item.kind == "function_call":
            place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
            out = self._event("response.function_call_arguments.done", **place, arguments=item.text)
        else:
            at = self._at(item)
            if item.kind == "reasoning":
                out = self._event("response.reasoning_text.done", **at, text=item.text)
            else:
                out = self._event("response.output_text.done", **at, text=item.text, logprobs=item.logprobs)
            out += self._event("response.content_part.done", **at, part=item.content(is_done=True))
        return out + self._event("response.output_item.done", output_index=item.index, item=item.to_plain(status))

    def _at(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        output = [item.to_plain(told) for item, told in zip(self._items, self._statuses, strict=True)]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": output,
            "usage": _usage(usage) if usage is not None else None,
            **self._echo,
            **({"timing": usage.timing} if usage is not None and usage.timing is not None else {}),
        }


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """Return what a response repeats of its request."""
    reasoning = body.reasoning
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "store": False,
        "background": False,
        "temperature": body.temperature,
        "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
