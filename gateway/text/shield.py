"""Keeps special tokens in a prompt to those that the chat template wrote: a user's text can name them, never be them.

Before rendering, every special-token text inside the user's strings is broken by a guard character; after it, what
still reads as a special token came from the template, and the guard is taken out of the rest. Knows no tokenizer.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from core.errors import BadRequest

_GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode noncharacters: valid in a string, meaningless in any text."""


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token's text, and whether it swallows whitespace beside it."""

    index: int
    content: str
    strips_left: bool = False
    strips_right: bool = False


class Shield:
    """Shields strings and splits rendered text for one set of special tokens.

    A special token of a single character cannot be broken; it counts as plain text wherever it stands.
    """

    def __init__(self, specials: tuple[SpecialToken, ...]) -> None:
        self._by_content = {special.content: special for special in specials if len(special.content) > 1}
        longest_first = sorted(self._by_content, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = frozenset(text[:end] for text in longest_first for end in range(1, len(text)))
        self._longest = max(map(len, longest_first), default=0)

    def choose_guard(self, value: Any) -> str:
        """Return a guard character that occurs nowhere in `value` (nested dicts, lists and strings)."""
        text = "".join(_strings(value))
        for guard in _GUARDS:
            if guard not in text:
                return guard
        raise BadRequest("the messages hold every Unicode noncharacter; send plain text", param="messages")

    def cover(self, value: Any, guard: str) -> Any:
        """Return a copy of `value` in which no string holds a special token, or can begin one at its end."""
        if isinstance(value, str):
            return self._cover_text(value, guard)
        if isinstance(value, Mapping):
            pairs = cast("Mapping[str, Any]", value).items()
            return {self._cover_text(key, guard): self.cover(item, guard) for key, item in pairs}
        if isinstance(value, list | tuple):
            return [self.cover(item, guard) for item in cast("list[Any]", value)]
        return value

    def _cover_text(self, text: str, guard: str) -> str:
        if self._pattern is None:
            return text
        # Breaking one token may leave an overlapping one behind it whole, so go on right after the guard.
        start = 0
        while match := self._pattern.search(text, start):
            cut = match.start() + 1
            text = text[:cut] + guard + text[cut:]
            start = cut + 1
        for end in range(1, min(self._longest, len(text) + 1)):
            if text[-end:] in self._beginnings:
                return text + guard
        return text

    def split(self, text: str, guard: str) -> Iterator[str | SpecialToken]:
        """Yield rendered text as plain segments (guards removed, empty ones left out) and special tokens, in order."""
        if self._pattern is None:
            matches: list[re.Match[str]] = []
        else:
            matches = list(self._pattern.finditer(text))
        start, strip_left = 0, False
        for match in matches:
            special = self._by_content[match[0]]
            segment = text[start : match.start()]
            yield from _segment(segment, guard, strip_left, special.strips_left)
            yield special
            start, strip_left = match.end(), special.strips_right
        yield from _segment(text[start:], guard, strip_left, False)


def _segment(text: str, guard: str, strip_left: bool, strip_right: bool) -> Iterator[str]:
    if strip_left:
        text = text.lstrip()
    if strip_right:
        text = text.rstrip()
    text = text.replace(guard, "")
    if text:
        yield text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _strings(item)
