"""Reads answers of models with a chat template: reasoning, text and tool calls out of one stream of tokens.

Composes detokenizer, the splitter of reasoning, the parser of calls and the stop scanner. Knows no prompt and no HTTP.
"""

from dataclasses import dataclass

from core.handover import TokenLogprobs
from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.calls.parser import CallParser
from gateway.text.chat import TextRules
from gateway.text.detokenizer import Detokenizer
from gateway.text.piece import CallDelta, Piece
from gateway.text.stop import StopScanner
from gateway.text.thinking import Stage, ThinkingSplitter
from gateway.text.vocabulary import Vocabulary


@dataclass(slots=True)
class _Found:
    """What one delta adds."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, CallDelta] | None = None
    num_tokens: int = 0
    num_reasoning: int = 0


class TemplateAnswer:
    """Implements `AnswerText`.

    Tokens up to the closing mark of the reasoning count as reasoning. Stop strings are looked for in text only, and
    only in that of tokens after the first `min_tokens`; tokens behind a match are surplus.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        rules: TextRules,
        *,
        splitter: ThinkingSplitter | None,
        parser: CallParser | None,
        shown: frozenset[int],
    ) -> None:
        """`shown` are ids that the two parsers must see, however special."""
        hidden = (vocabulary.special_ids - shown) if rules.skip_special else frozenset[int]()
        self._detokenizer = Detokenizer(vocabulary, skip_special=False, silent=hidden | rules.silent)
        self._splitter = splitter
        self._parser = parser
        self._scanner = StopScanner(rules.stops) if rules.stops else None
        self._min_tokens = rules.min_tokens
        self._call_prefix = rules.call_prefix
        self._num_tokens = 0
        self._undecided: list[TokenLogprobs] = []
        self._num_undecided = 0
        """Tokens of which it is not known yet whether they begin a reasoning, and their log-probabilities."""
        self.num_surplus = 0

    def push(self, delta: Delta) -> Piece:
        found = _Found()
        logprobs = (*self._undecided, *delta.logprobs)
        taken, finish = self._take_tokens(delta, found)
        matched = self._scanner.matched if self._scanner is not None else None
        if finish is not None and matched is None:
            matched = self._end(found)
            finish = FinishReason.STOP if matched is not None else finish
        total = self._num_undecided + taken
        if self._is_undecided and finish is None:
            self._num_undecided, self._undecided = total, list(logprobs)
            return Piece("", 0)
        self._num_undecided, self._undecided = 0, []
        reasoned = found.num_reasoning
        return Piece(
            found.text,
            total,
            logprobs[reasoned:total],
            finish,
            found.reasoning,
            reasoned,
            logprobs[:reasoned],
            tuple((found.calls or {}).values()),
            finish is not None and self._parser is not None and self._parser.has_calls and matched is None,
            matched,
        )

    @property
    def _is_undecided(self) -> bool:
        return self._splitter is not None and self._splitter.stage is Stage.BEFORE

    def _take_tokens(self, delta: Delta, found: _Found) -> tuple[int, FinishReason | None]:
        """Return (tokens taken, finish): token by token as long as it matters which one does something."""
        ids = delta.token_ids
        for taken, token in enumerate(ids):
            if self._scanner is None and (self._splitter is None or self._splitter.stage is Stage.ANSWER):
                self._feed(self._detokenizer.push(ids[taken:]), found)
                return len(ids), delta.finish
            self._num_tokens += 1
            before = self._splitter.stage if self._splitter is not None else Stage.ANSWER
            self._feed(self._detokenizer.push((token,)), found)
            if self._splitter is not None and Stage.REASONING in (before, self._splitter.stage):
                found.num_reasoning = self._num_undecided + taken + 1
            if self._scanner is not None and self._scanner.matched is not None:
                self.num_surplus += len(ids) - taken - 1
                return taken + 1, FinishReason.STOP
        return len(ids), delta.finish

    def _feed(self, text: str, found: _Found) -> None:
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
            found.reasoning += reasoning
        self._feed_answer(text, found)

    def _feed_answer(self, text: str, found: _Found) -> None:
        if not text:
            return
        if self._parser is None:
            self._take_text(text, found)
            return
        passed, calls = self._parser.push(text)
        self._take_text(passed, found)
        if calls and (self._scanner is None or self._scanner.matched is None):
            self._take_calls(calls, found)

    def _take_text(self, text: str, found: _Found) -> None:
        scanner = self._scanner
        if scanner is None or self._num_tokens <= self._min_tokens:
            found.text += text
        elif scanner.matched is None:
            found.text += scanner.push(text)

    def _take_calls(self, calls: list[CallDelta], found: _Found) -> None:
        if self._scanner is not None:
            # No text comes after a call: what might have become a stop string is text.
            found.text += self._scanner.finish()
        if found.calls is None:
            found.calls = {}
        for call in calls:
            call_id = f"{self._call_prefix}{call.index}" if call.name else ""
            known = found.calls.get(call.index, CallDelta(call.index, "", call_id, call.name))
            found.calls[call.index] = CallDelta(call.index, known.arguments + call.arguments, known.id, known.name)

    def _end(self, found: _Found) -> str | None:
        """Take what was held back; return the stop string that it completes."""
        self._feed(self._detokenizer.finish(), found)
        if self._splitter is not None:
            reasoning, text = self._splitter.finish()
            found.reasoning += reasoning
            self._feed_answer(text, found)
        if self._parser is not None:
            self._take_text(self._parser.finish(), found)
        if self._scanner is None:
            return None
        if self._scanner.matched is None:
            found.text += self._scanner.finish()
        return self._scanner.matched
