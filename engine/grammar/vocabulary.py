"""A model's vocabulary as grammars need it: the library's own form of it, and the mask of what ends a text.

Every added token counts as special, flagged so or not: text never matches it, only a grammar that names its id does.
So no string inside an answer can hold a token that begins a turn, a tool call, or reasoning. Knows no requests.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

Words = npt.NDArray[np.int32]
"""A mask: one bit per token id, the lowest id in the lowest bit of the first word."""


def mask_of(ids: Iterable[int], vocab_size: int) -> Words:
    """Return the mask int32 [ceil(vocab_size / 32)] that allows exactly `ids`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.fromiter(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """One model's."""

    tokenizer: LLTokenizer
    stop_ids: frozenset[int]
    """Ids that end a text."""
    stops: Words
    """The mask of `stop_ids`."""


def build_vocabulary(definition: dict[str, Any], vocab_size: int, stop_ids: tuple[int, ...]) -> GrammarVocabulary:
    """Return the vocabulary of a tokenizer.json's content; raises `ValueError` if the library does not understand it."""
    added = cast("list[dict[str, Any]]", definition.get("added_tokens") or [])
    whole = {
        **definition,
        "added_tokens": [{**token, "special": True} for token in added],
        "truncation": None,
        "padding": None,
    }
    tokenizer = LLTokenizer(json.dumps(whole), n_vocab=vocab_size, eos_token=list(stop_ids))
    return GrammarVocabulary(
        tokenizer=tokenizer,
        stop_ids=frozenset(stop_ids),
        stops=mask_of(stop_ids, vocab_size),
    )


def read_definition(directory: Path) -> dict[str, Any] | None:
    """Return the content of a model directory's tokenizer.json, None if it has none."""
    path = directory / "tokenizer.json"
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
