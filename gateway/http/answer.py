"""What all routes have in common in an answer: choices, usage, and the format that a route gives them.

Knows no HTTP: formats turn pieces into bytes, others send them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.handover import TokenLogprobs
from gateway.http.errors import HttpFault
from gateway.http.sse import json_bytes
from gateway.text.piece import CallDelta, Piece


@dataclass(slots=True)
class Usage:
    """Token counts of one client request, summed over its choices; the prompt counts once per prompt."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    """Output tokens spent on reasoning; None: the request has no reasoning to tell apart."""
    timing: list[dict[str, Any]] | None = None
    """With the end, if asked for: what happened when, per choice."""

    @property
    def timing_member(self) -> bytes:
        """Return the timing as a member of a JSON object, with its leading comma; empty if it was not asked for."""
        return b',"timing":' + json_bytes(self.timing) if self.timing is not None else b""

    def to_json(self) -> bytes:
        """Return OpenAI's usage object."""
        fields = (
            b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}'
            % (
                self.prompt_tokens,
                self.completion_tokens,
                self.prompt_tokens + self.completion_tokens,
                self.cached_tokens,
            )
        )
        if self.reasoning_tokens is None:
            return fields + b"}"
        return fields + b',"completion_tokens_details":{"reasoning_tokens":%d}}' % self.reasoning_tokens


@dataclass(slots=True)
class Call:
    """One tool call of a whole answer."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])

    def add(self, delta: CallDelta) -> None:
        """Take more of it."""
        self.id = self.id or delta.id
        self.name = self.name or delta.name
        self.arguments.append(delta.arguments)


@dataclass(slots=True)
class Choice:
    """One finished choice of a whole answer."""

    index: int
    parts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish: str | None = None
    reasoning: list[str] = field(default_factory=list[str])
    reasoning_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    calls: dict[int, Call] = field(default_factory=dict[int, Call])
    matched_stop: str | None = None

    @property
    def text(self) -> str:
        """The visible text."""
        return "".join(self.parts)

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self.parts.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        self.finish = piece.ending
        self.matched_stop = piece.matched_stop
        self.reasoning.append(piece.reasoning)
        self.reasoning_logprobs.extend(piece.reasoning_logprobs)
        for delta in piece.calls:
            self.calls.setdefault(delta.index, Call()).add(delta)


class AnswerFormat(Protocol):
    """Writes one request's answer in the words of its route. Holds per-choice state; used by one request."""

    @property
    def keepalive(self) -> bytes:
        """What says nothing but that the stream lives."""
        ...

    def opening(self, index: int, usage: Usage) -> bytes:
        """Return the events that begin a choice; may be empty."""
        ...

    def piece(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """Return the events of one piece (its text, its end); empty if it shows nothing."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the last choice, with the end mark if the route has one."""
        ...

    def failure(self, fault: HttpFault, usage: Usage) -> bytes:
        """Return the events that end a stream badly: none of them can be taken for the end of a whole answer."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer as one JSON body."""
        ...
