"""The words of /v1/chat/completions: chunk events and the whole answer. Knows no HTTP and no cluster."""

from collections.abc import Mapping, Sequence
from typing import Any

from core.handover import TokenLogprobs
from gateway.http.answer import Choice, Usage
from gateway.http.errors import HttpFault, openai_error
from gateway.http.keepalive import COMMENT
from gateway.http.logprobs import chat_entries
from gateway.http.sse import DONE, TextEvent, event, json_bytes
from gateway.text.piece import CallDelta, Piece
from gateway.text.vocabulary import Vocabulary


class ChatAnswer:
    """Implements `AnswerFormat` for chats."""

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        created: int,
        num_choices: int,
        vocabulary: Vocabulary,
        include_usage: bool,
        continuous_usage: bool,
        with_logprobs: bool,
        reasons: bool = False,
    ) -> None:
        """`created` in Unix seconds; `reasons`: answers have reasoning of their own beside the text."""
        self._vocabulary = vocabulary
        self._include_usage = include_usage
        self._continuous = continuous_usage
        self._with_logprobs = with_logprobs
        self._is_plain = not (with_logprobs or continuous_usage)
        self._reasons = reasons
        self._fields = b'"created":%d,"model":%b' % (created, json_bytes(model))
        self._id = json_bytes(answer_id)
        self._chunk_head = b'{"id":%b,"object":"chat.completion.chunk",%b,"choices":[' % (self._id, self._fields)
        # With usage asked for, all chunks but the last say null, unless they say the count so far.
        self._end = b"]" + (b',"usage":null' if include_usage and not continuous_usage else b"")
        self._texts: list[TextEvent | None] = [None] * num_choices
        self._reasonings: list[TextEvent | None] = [None] * num_choices

    def _form(self, forms: list[TextEvent | None], index: int) -> TextEvent:
        """Return the template of a choice's text or reasoning, made when first needed: whole answers have none."""
        found = forms[index]
        if found is None:
            name = b"content" if forms is self._texts else b"reasoning_content"
            found = forms[index] = self._text_event(name, index)
        return found

    def _text_event(self, name: bytes, index: int) -> TextEvent:
        return TextEvent(
            self._chunk_head + b'{"index":%d,"delta":{"%b":' % (index, name),
            b'},"logprobs":',
            b',"finish_reason":null}' + self._end,
        )

    keepalive = COMMENT

    def opening(self, index: int, usage: Usage) -> bytes:
        begin = b'"content":null,"reasoning_content":""' if self._reasons else b'"content":""'
        return self._delta(index, b'{"role":"assistant",%b}' % begin, b"null", usage)

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        text = piece.text
        if text and self._is_plain and piece.finish is None and not (piece.reasoning or piece.calls):
            # The case of almost every token.
            return (self._texts[index] or self._form(self._texts, index)).render(text)
        out = b""
        if piece.reasoning or piece.reasoning_logprobs:
            out = self._written(
                self._form(self._reasonings, index),
                piece.reasoning,
                piece.reasoning_logprobs,
                "reasoning_content",
                usage,
            )
        if text or piece.logprobs:
            out += self._written(self._form(self._texts, index), text, piece.logprobs, "content", usage)
        if piece.calls:
            calls = json_bytes([_call_delta(call) for call in piece.calls])
            out += self._delta(index, b'{"tool_calls":%b}' % calls, b"null", usage)
        if piece.ending is not None:
            out += self._delta(index, b"{}", b'"%b"' % piece.ending.encode(), usage)
        return out

    def _delta(self, index: int, delta: bytes, finish: bytes, usage: Usage) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b}' % (index, delta, finish)
        return event(self._chunk_head + choice + self._end + self._running(usage) + b"}")

    def _written(self, form: TextEvent, text: str, logprobs: Sequence[TokenLogprobs], name: str, usage: Usage) -> bytes:
        if not self._continuous and not logprobs:
            return form.render(text)
        entries = json_bytes(self._entries({name: logprobs})) if logprobs else b"null"
        return form.render_with(text, entries, self._running(usage))

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage and usage.timing is None:
            return DONE
        return event(self._chunk_head + b'],"usage":' + usage.to_json() + usage.timing_member + b"}") + DONE

    def failure(self, fault: HttpFault, usage: Usage) -> bytes:
        del usage
        # No end mark: a client must not take it for a whole answer.
        return event(openai_error(fault))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        written = b",".join(self._whole_choice(choice) for choice in choices)
        head = b'{"id":%b,"object":"chat.completion",%b,"choices":[' % (self._id, self._fields)
        return head + written + b'],"usage":' + usage.to_json() + usage.timing_member + b"}"

    def _whole_choice(self, choice: Choice) -> bytes:
        # As in OpenAI's own answers, a message that only calls tools has no content.
        message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
        if self._reasons:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in choice.calls.values()
            ]
        message["refusal"] = None
        logprobs = {"content": choice.logprobs, "reasoning_content": choice.reasoning_logprobs}
        return json_bytes(
            {
                "index": choice.index,
                "message": message,
                "logprobs": self._entries(logprobs) if self._with_logprobs else None,
                "finish_reason": choice.finish,
            }
        )

    def _entries(self, logprobs: Mapping[str, Sequence[TokenLogprobs]]) -> dict[str, object]:
        """Return the object `logprobs`; a list that a chunk says nothing of is null in it."""
        names = ("content", "reasoning_content") if self._reasons else ("content",)
        lists = {name: chat_entries(self._vocabulary, logprobs[name]) if name in logprobs else None for name in names}
        return {**lists, "refusal": None}

    def _running(self, usage: Usage) -> bytes:
        return b',"usage":' + usage.to_json() if self._continuous else b""


def _call_delta(call: CallDelta) -> dict[str, Any]:
    function: dict[str, str] = {"name": call.name} if call.name else {}
    head: dict[str, Any] = {"index": call.index}
    if call.id:
        head |= {"id": call.id, "type": "function"}
    return {**head, "function": {**function, "arguments": call.arguments}}
