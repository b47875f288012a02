"""What the two routes have in common in an answer: choices, usage, and the format that a route gives them.

Knows no HTTP: formats turn pieces into bytes, others send them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.handover import TokenLogprobs
from core.request import FinishReason
from gateway.text.sample import Piece


@dataclass(slots=True)
class Usage:
    """Token counts of one client request, summed over its choices; the prompt counts once per prompt."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_json(self) -> bytes:
        """Return OpenAI's usage object."""
        return (
            b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
            % (
                self.prompt_tokens,
                self.completion_tokens,
                self.prompt_tokens + self.completion_tokens,
                self.cached_tokens,
            )
        )


@dataclass(slots=True)
class Choice:
    """One finished choice of a whole answer."""

    index: int
    parts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        """The visible text."""
        return "".join(self.parts)

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self.parts.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        self.finish = piece.finish


class AnswerFormat(Protocol):
    """Writes one request's answer in the words of its route. Holds per-choice state; used by one request."""

    def opening(self, index: int, usage: Usage) -> bytes:
        """Return the events that begin a choice; may be empty."""
        ...

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Return the events of one piece (its text, its end); empty if it shows nothing."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the last choice, before the end mark."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer as one JSON body."""
        ...
