"""The words of Anthropic's /v1/messages: blocks that open and close, and the whole message. Knows no HTTP."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.http.answer import Choice, Usage
from gateway.http.errors import HttpFault, anthropic_error
from gateway.http.sse import json_bytes, named_event
from gateway.text.piece import CallDelta, Piece

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_TEXT, _THINKING = b"text", b"thinking"


class MessagesAnswer:
    """Implements `AnswerFormat` for one message. Blocks come in the order of pieces: thinking, text, calls of tools."""

    def __init__(self, *, answer_id: str, model: str) -> None:
        self._id = answer_id
        self._model = model
        self._index = -1
        """Of the block that was opened last."""
        self._open: bytes | int | None = None
        """Kind of the open block, or the number of the call that it is."""
        self._delta = b""
        """The head of a delta event of the open block."""

    keepalive = named_event(b"ping", b'{"type":"ping"}')

    def opening(self, index: int, usage: Usage) -> bytes:
        del index
        message = self._message([], None, None, usage)
        return named_event(b"message_start", json_bytes({"type": "message_start", "message": message}))

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        del index
        out = b""
        if piece.reasoning:
            out = self._written(_THINKING, piece.reasoning)
        if piece.text:
            out += self._written(_TEXT, piece.text)
        for call in piece.calls:
            out += self._called(call)
        if piece.ending is not None:
            delta = {"stop_reason": _stop_reason(piece.ending, piece.matched_stop), "stop_sequence": piece.matched_stop}
            body = {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
            out += self._close() + named_event(b"message_delta", json_bytes(body))
        return out

    def closing(self, usage: Usage) -> bytes:
        return named_event(b"message_stop", b'{"type":"message_stop"%b}' % usage.timing_member)

    def failure(self, fault: HttpFault, usage: Usage) -> bytes:
        del usage
        return named_event(b"error", anthropic_error(fault, self._id))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        content: list[dict[str, Any]] = []
        if thought := "".join(choice.reasoning):
            content.append({"type": "thinking", "thinking": thought, "signature": self._id})
        if choice.text:
            content.append({"type": "text", "text": choice.text})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _parsed("".join(call.arguments))}
            for call in choice.calls.values()
        ]
        assert choice.finish is not None
        reason = _stop_reason(choice.finish, choice.matched_stop)
        message = self._message(content, reason, choice.matched_stop, usage)
        return json_bytes(message if usage.timing is None else {**message, "timing": usage.timing})

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, matched: str | None, usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": matched,
            "usage": _usage(usage),
        }

    def _written(self, kind: bytes, text: str) -> bytes:
        opened = b""
        if self._open != kind:
            block = {"type": "thinking", "thinking": "", "signature": ""} if kind is _THINKING else _EMPTY_TEXT
            opened = self._begin(kind, block, b'{"type":"%b_delta","%b":' % (kind, kind))
        return opened + self._delta + json_bytes(text) + b"}}\n\n"

    def _called(self, call: CallDelta) -> bytes:
        opened = b""
        if self._open != call.index:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            opened = self._begin(call.index, block, b'{"type":"input_json_delta","partial_json":')
        if not call.arguments:
            return opened
        return opened + self._delta + json_bytes(call.arguments) + b"}}\n\n"

    def _begin(self, kind: bytes | int, block: dict[str, Any], delta: bytes) -> bytes:
        closed = self._close()
        self._index += 1
        self._open = kind
        self._delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b' % (
            self._index,
            delta,
        )
        body = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + named_event(b"content_block_start", json_bytes(body))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is _THINKING:
            # Clients send it back with the thought and insist on having one; nothing here checks it.
            signature = {"type": "signature_delta", "signature": self._id}
            body = {"type": "content_block_delta", "index": self._index, "delta": signature}
            signed = named_event(b"content_block_delta", json_bytes(body))
        self._open = None
        return signed + named_event(b"content_block_stop", b'{"type":"content_block_stop","index":%d}' % self._index)


_EMPTY_TEXT = {"type": "text", "text": ""}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's counts: cached tokens are counted apart from the other input."""
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def _stop_reason(ending: str, matched: str | None) -> str:
    return "stop_sequence" if matched is not None else _REASONS.get(ending, "end_turn")


def _parsed(arguments: str) -> Any:
    """Return a call's input as a value; what the model left unfinished stays a text."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
