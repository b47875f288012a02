"""Whether finished answers that were to have a form have it: counted for operators, and never a client's concern.

Workers choose every token among those that fit, so a violation is our bug or the library's. The text is followed by its
bytes, without the tokens and masks that wrote it. Knows no HTTP and no metrics.
"""

import json
from collections.abc import Callable
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from gateway.generation import Delta
from gateway.text.chat import AnswerText
from gateway.text.grammar import Shape
from gateway.text.piece import Piece

MAX_CHARS = 64 << 10
"""Longer texts are not looked at: these cost up to 30 ms of a thread."""
VERDICTS = ("fits", "violates", "unchecked")
_STRIDE = 256
"""Bytes between turns for other threads."""

Judge = Callable[[Shape, str], None]


class WatchedAnswer:
    """Implements `AnswerText` around another: hands the whole text to `judge` when it has ended by itself."""

    def __init__(self, text: AnswerText, shape: Shape, judge: Judge) -> None:
        self._text = text
        self._shape = shape
        self._judge = judge
        self._parts: list[str] = []

    @property
    def num_surplus(self) -> int:
        return self._text.num_surplus

    def push(self, delta: Delta) -> Piece:
        piece = self._text.push(delta)
        self._parts.append(piece.text)
        # What a limit or a stop string cuts is a beginning, and what calls tools has another form.
        if piece.ending == "stop" and piece.matched_stop is None:
            self._judge(self._shape, "".join(self._parts))
        return piece


def verdict_on(shape: Shape, text: str) -> str:
    """Return one of `VERDICTS`. Space around is none of the content's: formats leave some between reasoning and it."""
    if len(text) > MAX_CHARS:
        return "unchecked"
    grammar = json.dumps({"grammars": [dict(shape.entry), *map(dict, shape.named)]})
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    if matcher.is_error():
        return "unchecked"  # one that names tokens, which bytes have not
    return "fits" if _takes(matcher, text) or _takes(matcher, text.strip()) else "violates"


def _takes(matcher: LLMatcher, text: str) -> bool:
    matcher.reset()
    data = list(text.encode())
    for at in range(0, len(data), _STRIDE):
        part = data[at : at + _STRIDE]
        if matcher.try_consume_tokens(part) < len(part):
            return False
    return matcher.is_accepting()


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
