"""The words of /v1/completions: chunk events and the whole answer. Knows no HTTP and no cluster."""

from collections.abc import Sequence
from typing import Any

from gateway.http.answer import Choice, Usage
from gateway.http.errors import HttpFault, openai_error
from gateway.http.keepalive import COMMENT
from gateway.http.logprobs import completion_entries
from gateway.http.sse import DONE, TextEvent, event, json_bytes
from gateway.text.piece import Piece
from gateway.text.vocabulary import Vocabulary


class CompletionAnswer:
    """Implements `AnswerFormat` for plain completions."""

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        created: int,
        echoes: Sequence[str],
        vocabulary: Vocabulary,
        include_usage: bool,
        continuous_usage: bool,
        with_logprobs: bool,
    ) -> None:
        """`echoes` holds, for each choice, the prompt's text to repeat before the output, or an empty string."""
        self._vocabulary = vocabulary
        self._include_usage = include_usage
        self._continuous = continuous_usage
        self._with_logprobs = with_logprobs
        self._echoes = echoes
        self._offsets = [0] * len(echoes)
        self._head = b'{"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            json_bytes(answer_id),
            created,
            json_bytes(model),
        )
        self._end = b"]" + (b',"usage":null' if include_usage and not continuous_usage else b"")
        self._texts = [
            TextEvent(
                self._head + b'{"index":%d,"text":' % index, b',"logprobs":', b',"finish_reason":null}' + self._end
            )
            for index in range(len(echoes))
        ]

    keepalive = COMMENT

    def opening(self, index: int, usage: Usage) -> bytes:
        if not self._echoes[index]:
            return b""
        return self._texts[index].render_with(self._echoes[index], b"null", self._running(usage))

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        out = b""
        if piece.text or piece.logprobs:
            if self._continuous or piece.logprobs:
                out = self._texts[index].render_with(piece.text, self._logprobs(index, piece), self._running(usage))
            else:
                out = self._texts[index].render(piece.text)
        if piece.ending is not None:
            last = b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}' % (index, piece.ending.encode())
            out += event(self._head + last + self._end + self._running(usage) + b"}")
        return out

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage and usage.timing is None:
            return DONE
        return event(self._head + b'],"usage":' + usage.to_json() + usage.timing_member + b"}") + DONE

    def failure(self, fault: HttpFault, usage: Usage) -> bytes:
        del usage
        # No end mark: a client must not take it for a whole answer.
        return event(openai_error(fault))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        written = b",".join(self._whole_choice(choice) for choice in choices)
        return self._head + written + b'],"usage":' + usage.to_json() + usage.timing_member + b"}"

    def _whole_choice(self, choice: Choice) -> bytes:
        logprobs: dict[str, Any] | None = None
        if self._with_logprobs:
            logprobs, _ = completion_entries(self._vocabulary, choice.logprobs, 0)
        return json_bytes(
            {
                "index": choice.index,
                "text": self._echoes[choice.index] + choice.text,
                "logprobs": logprobs,
                "finish_reason": choice.finish,
            }
        )

    def _logprobs(self, index: int, piece: Piece) -> bytes:
        if not piece.logprobs:
            return b"null"
        entries, self._offsets[index] = completion_entries(self._vocabulary, piece.logprobs, self._offsets[index])
        return json_bytes(entries)

    def _running(self, usage: Usage) -> bytes:
        return b',"usage":' + usage.to_json() if self._continuous else b""
