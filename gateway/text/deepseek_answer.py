"""Reads answers of DeepSeek-V4 and V4.1: reasoning, text and tool calls out of one stream of tokens.

The published `deepseek_recipe` parser does the reading; here is what it leaves to its caller: characters that span
tokens, ids that never show, exact counts, stop strings, and its events as pieces. Knows no prompt and no HTTP.
"""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

import deepseek_recipe as recipe
import msgspec

from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.chat import TextRules
from gateway.text.detokenizer import Detokenizer
from gateway.text.piece import CallDelta, Piece
from gateway.text.stop import StopScanner
from gateway.text.vocabulary import Vocabulary, hidden_ids

_RUNS = re.compile(r"[^\n<]+|[\n<]+")
_FINISH = {
    FinishReason.STOP: recipe.InferenceFinishReason.Stop,
    FinishReason.LENGTH: recipe.InferenceFinishReason.Length,
}


@dataclass(frozen=True, slots=True)
class Marks:
    """Token ids that the parser looks for."""

    think_end: int
    call: int | None
    """Begins the markup of tool calls, which ends the reasoning too; None: no tools in this request."""
    shown: frozenset[int]
    """Shown to the parser, however special."""


class _Stage(enum.Enum):
    """Where the parser stands, as far as its events tell."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    OTHER = enum.auto()


class _Function(msgspec.Struct, gc=False):
    name: str = ""
    arguments: str = ""


class _Call(msgspec.Struct, gc=False):
    index: int
    function: _Function


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] = []


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Chunk).decode


class _Collected:
    """What one delta's events say, added up."""

    __slots__ = ("calls", "is_calling", "reasoning", "text")

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: dict[int, CallDelta] = {}
        self.is_calling = False


class DeepseekAnswer:
    """Implements `AnswerText`.

    Tokens up to the closing mark of the reasoning count as reasoning. Stop strings are looked for in text only, and
    only in that of tokens after the first `min_tokens`; tokens behind a match are surplus.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        processor: recipe.StreamProcessor,
        marks: Marks,
        rules: TextRules,
        *,
        starts_in_reasoning: bool,
    ) -> None:
        silent = rules.silent
        if rules.skip_special:
            silent = hidden_ids(vocabulary.special_ids, marks.shown, silent)
        self._detokenizer = Detokenizer(vocabulary, skip_special=False, silent=silent, continues=True)
        self._processor = processor
        self._think_end = marks.think_end
        self._call = marks.call
        self._is_reasoning = starts_in_reasoning
        self._scanner = StopScanner(rules.stops) if rules.stops else None
        self._min_tokens = rules.min_tokens
        self._call_prefix = rules.call_prefix
        self._num_tokens = 0
        self._told = _Stage.OTHER
        self._told_last = ""
        """What the parser's last event was about, and its last character."""
        self._clear = _Stage.OTHER
        """Not OTHER: the parser holds nothing back, and where it stands, text without marks passes it as it is."""
        self.num_surplus = 0
        self._collected = _Collected()
        processor.push(recipe.InferenceChunk.ready())

    def push(self, delta: Delta) -> Piece:
        if self._scanner is None:
            return self._push_unscanned(delta)
        self._collected = _Collected()
        taken, finish = self._scan(delta, self._scanner)
        if finish is not None:
            finish = self._end(finish, self._scanner)
        return self._piece(delta, taken, finish)

    def _push_unscanned(self, delta: Delta) -> Piece:
        ids, text = delta.token_ids, self._detokenizer.push(delta.token_ids)
        if delta.finish is None and self._clear is not _Stage.OTHER and self._is_inert(text):
            # Nothing of it concerns the parser or what was said before: the case of almost every token.
            if not self._is_reasoning:
                if self._clear is _Stage.TEXT:
                    return Piece(text, len(ids), delta.logprobs)
            elif self._clear is _Stage.REASONING and self._call not in ids and self._think_end not in ids:
                return Piece("", len(ids), (), None, text, len(ids), delta.logprobs)
        self._collected = _Collected()
        self._feed(text)
        finish = self._end(delta.finish, None) if delta.finish is not None else None
        return self._piece(delta, len(ids), finish)

    def _scan(self, delta: Delta, scanner: StopScanner) -> tuple[int, FinishReason | None]:
        """Feed token by token, so that it does not depend on the cut of deltas which one completes a stop string."""
        for taken, token in enumerate(delta.token_ids, start=1):
            self._num_tokens += 1
            self._feed(self._detokenizer.push((token,)))
            if scanner.matched is not None:
                self.num_surplus += len(delta.token_ids) - taken
                return taken, FinishReason.STOP
        return len(delta.token_ids), delta.finish

    def _feed(self, text: str) -> None:
        if text and self._clear is not _Stage.OTHER and self._is_inert(text):
            self._take(text)
            return
        # The parser holds back whole what it is given if a mark may begin in it: it gets text and marks apart.
        for run in _RUNS.findall(text):
            is_inert = self._is_inert(run)
            if is_inert and self._clear is not _Stage.OTHER:
                self._take(run)
                continue
            self._told = _Stage.OTHER
            self._collect(self._processor.push(recipe.InferenceChunk.text(run)))
            # What is held back begins with a line end or an open mark: nothing is, if the end of this run came out.
            self._clear = self._told if is_inert and self._told_last == run[-1] else _Stage.OTHER

    def _is_inert(self, text: str) -> bool:
        """Return whether no mark can begin in `text`, nor the line ends that go with one: most tokens have neither."""
        keeps_lines = self._call is None and _Stage.TEXT in (self._clear, self._told)
        return "<" not in text and (keeps_lines or "\n" not in text)

    def _take(self, text: str) -> None:
        """Take text that the parser need not see."""
        if self._clear is _Stage.TEXT:
            self._take_text(text)
        else:
            self._collected.reasoning += text

    def _end(self, finish: FinishReason, scanner: StopScanner | None) -> FinishReason:
        if scanner is not None and scanner.matched is not None:
            self._processor.close()
            return finish
        self._feed(self._detokenizer.finish())
        if self._clear is not _Stage.OTHER:
            self._processor.close()
        elif scanner is None or scanner.matched is None:
            self._collect(self._processor.push(recipe.InferenceChunk.finish(_FINISH[finish])))
            self._collect(self._processor.finish())
        if scanner is not None:
            if scanner.matched is not None:
                self._processor.close()
                return FinishReason.STOP
            self._collected.text += scanner.finish()
        return finish

    def _collect(self, events: Sequence[object]) -> None:
        found = self._collected
        for event in events:
            assert isinstance(event, recipe.ChatCompletionChunk)
            for choice in _decode(event.to_json()).choices:
                delta = choice.delta
                if delta.reasoning_content:
                    found.reasoning += delta.reasoning_content
                    self._told, self._told_last = _Stage.REASONING, delta.reasoning_content[-1]
                if delta.content:
                    self._take_text(delta.content)
                    self._told, self._told_last = _Stage.TEXT, delta.content[-1]
                for call in delta.tool_calls:
                    self._take_call(call)
                    self._told = _Stage.OTHER
                if choice.finish_reason == "tool_calls":
                    found.is_calling = True

    def _take_text(self, text: str) -> None:
        scanner = self._scanner
        if scanner is None or self._num_tokens <= self._min_tokens:
            self._collected.text += text
        elif scanner.matched is None:
            self._collected.text += scanner.push(text)

    def _take_call(self, call: _Call) -> None:
        found = self._collected
        if self._scanner is not None:
            if self._scanner.matched is not None:
                return
            # No text comes after a call: what might have become a stop string is text.
            found.text += self._scanner.finish()
        known = found.calls.get(call.index)
        name, arguments = call.function.name, call.function.arguments
        if known is None:
            # The parser tells the name once; its ids are random, ours follow from the request.
            call_id = f"{self._call_prefix}{call.index}" if name else ""
            found.calls[call.index] = CallDelta(call.index, arguments, call_id, name)
        else:
            found.calls[call.index] = msgspec.structs.replace(known, arguments=known.arguments + arguments)

    def _piece(self, delta: Delta, taken: int, finish: FinishReason | None) -> Piece:
        found = self._collected
        reasoned = self._reasoned(delta.token_ids[:taken]) if self._is_reasoning else 0
        return Piece(
            found.text,
            taken,
            delta.logprobs[reasoned:taken],
            finish,
            found.reasoning,
            reasoned,
            delta.logprobs[:reasoned],
            tuple(found.calls.values()),
            found.is_calling,
            self._scanner.matched if self._scanner is not None and finish is not None else None,
        )

    def _reasoned(self, ids: tuple[int, ...]) -> int:
        """Return how many of the next ids belong to the reasoning, which the closing mark ends, or a tool call."""
        for at, token in enumerate(ids):
            if token in (self._think_end, self._call):
                self._is_reasoning = False
                return at + 1 if token == self._think_end else at
        return len(ids)
