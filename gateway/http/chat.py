"""The words of /v1/chat/completions: chunk events and the whole answer. Knows no HTTP and no cluster."""

from collections.abc import Sequence

from gateway.http.answer import Choice, Usage
from gateway.http.logprobs import chat_entries
from gateway.http.sse import TextEvent, event, json_bytes
from gateway.text.sample import Piece
from gateway.text.vocabulary import Vocabulary


class ChatFormat:
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
    ) -> None:
        """`created` in Unix seconds."""
        self._vocabulary = vocabulary
        self._include_usage = include_usage
        self._continuous = continuous_usage
        self._with_logprobs = with_logprobs
        self._fields = b'"created":%d,"model":%b' % (created, json_bytes(model))
        self._id = json_bytes(answer_id)
        self._chunk_head = b'{"id":%b,"object":"chat.completion.chunk",%b,"choices":[' % (self._id, self._fields)
        # With usage asked for, all chunks but the last say null, unless they say the count so far.
        self._end = b"]" + (b',"usage":null' if include_usage and not continuous_usage else b"")
        self._texts = [
            TextEvent(
                self._chunk_head + b'{"index":%d,"delta":{"content":' % index,
                b'},"logprobs":',
                b',"finish_reason":null}' + self._end,
            )
            for index in range(num_choices)
        ]

    def opening(self, index: int, usage: Usage) -> bytes:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return event(self._chunk_head + delta + self._end + self._running(usage) + b"}")

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        out = b""
        if piece.text or piece.logprobs:
            if self._continuous or piece.logprobs:
                out = self._texts[index].render_with(piece.text, self._logprobs(piece), self._running(usage))
            else:
                out = self._texts[index].render(piece.text)
        if piece.finish is not None:
            delta = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}' % (index, piece.finish.encode())
            out += event(self._chunk_head + delta + self._end + self._running(usage) + b"}")
        return out

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return event(self._chunk_head + b'],"usage":' + usage.to_json() + b"}")

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        written = b",".join(self._whole_choice(choice) for choice in choices)
        head = b'{"id":%b,"object":"chat.completion",%b,"choices":[' % (self._id, self._fields)
        return head + written + b'],"usage":' + usage.to_json() + b"}"

    def _whole_choice(self, choice: Choice) -> bytes:
        return json_bytes(
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs_object(choice) if self._with_logprobs else None,
                "finish_reason": choice.finish,
            }
        )

    def _logprobs_object(self, source: Choice | Piece) -> dict[str, object]:
        return {"content": chat_entries(self._vocabulary, source.logprobs), "refusal": None}

    def _logprobs(self, piece: Piece) -> bytes:
        return json_bytes(self._logprobs_object(piece)) if piece.logprobs else b"null"

    def _running(self, usage: Usage) -> bytes:
        return b',"usage":' + usage.to_json() if self._continuous else b""
