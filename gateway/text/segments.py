"""Encodes rendered prompts piece by piece, each piece of plain text once.

A conversation grows at its end: the texts between special tokens that were seen before come from a bounded cache, so a
follow-up turn costs its new text. Exact: special tokens are borders of tokens anyway. Safe from several threads.
"""

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import tokenizers

Ids = tuple[int, ...]
MAX_CHARS = 16 << 20
"""Characters that a cache holds by default: one byte or two each for the text, and about one for the ids."""
MIN_CACHED = 16
"""Shorter texts are encoded again: that is as fast as looking them up under a lock is safe."""


class SegmentEncoder:
    """Encodes plain text without any added token: what spells a special token in it stays text."""

    def __init__(self, definition: Mapping[str, Any], max_chars: int = MAX_CHARS) -> None:
        """`definition` is the content of tokenizer.json."""
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(_without_added(definition)))
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._max_chars = max_chars
        self._lock = threading.Lock()
        # Tuples of integers would take nine times the room.
        self._cache: OrderedDict[str, array[int]] = OrderedDict()
        self.num_chars = 0
        """Characters held."""

    def encode(self, text: str) -> Ids:
        """Return the ids of one stretch of plain text."""
        if len(text) < MIN_CACHED:
            return tuple(self._encoder.encode(text, add_special_tokens=False).ids)
        with self._lock:
            ids = self._cache.get(text)
            if ids is not None:
                self._cache.move_to_end(text)
                return tuple(ids)
        # A batch of one: only batches give other threads their turn meanwhile.
        ids = tuple(self._encoder.encode_batch([text], add_special_tokens=False)[0].ids)
        self._keep(text, ids)
        return ids

    def _keep(self, text: str, ids: Ids) -> None:
        if len(text) > self._max_chars:
            return
        with self._lock:
            if text not in self._cache:
                self._cache[text] = array("i", ids)
                self.num_chars += len(text)
            while self.num_chars > self._max_chars:
                old, _ = self._cache.popitem(last=False)
                self.num_chars -= len(old)


def _without_added(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition of the trained vocabulary alone; some files list added tokens there as well."""
    spellings = {token["content"] for token in definition["added_tokens"]}
    model: Mapping[str, Any] = definition["model"]
    if isinstance(model.get("vocab"), dict):
        vocab = cast("dict[str, int]", model["vocab"])
        model = {**model, "vocab": {text: index for text, index in vocab.items() if text not in spellings}}
    return {**definition, "added_tokens": [], "model": model}


def split_ranges(prompt: str, ranges: Sequence[tuple[int, int]]) -> Iterable[tuple[str, bool]]:
    """Yield the prompt's pieces in order: (text, is a special token); `ranges` are ascending code point ranges."""
    at = 0
    for start, end in ranges:
        if start > at:
            yield prompt[at:start], False
        yield prompt[start:end], True
        at = end
    if at < len(prompt):
        yield prompt[at:], False
