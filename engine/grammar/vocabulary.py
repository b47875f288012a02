"""A model's vocabulary as grammars need it: the library's own form of it, and the mask of what ends a text.

Every added token counts as special, flagged so or not: text never matches it, only a grammar that names its id does.
So no string inside an answer can hold a token that begins a turn, a tool call, or reasoning. Knows no requests.
"""

import json
import secrets
from collections.abc import Iterable, Mapping
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


def build_vocabulary(
    definition: dict[str, Any], vocab_size: int, stop_ids: tuple[int, ...], nonce: str | None = None
) -> GrammarVocabulary:
    """Return the vocabulary of a tokenizer.json's content; raises `ValueError` if the library does not understand it.

    The library tokenizes text that a grammar forces, and would take the special token for its spelling. So added tokens
    get spellings that nobody can guess: `nonce`, by default random, is part of them.
    """
    nonce = nonce or secrets.token_hex(16)
    added = cast("list[dict[str, Any]]", definition.get("added_tokens") or [])
    names = {token["content"]: f"\ue000{nonce}-{token['id']}\ue001" for token in added}
    model = cast("dict[str, Any]", definition["model"])
    whole = {
        **definition,
        "added_tokens": [{**token, "content": names[token["content"]], "special": True} for token in added],
        "model": {**model, "vocab": _renamed(model.get("vocab"), names)},
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    tokenizer = LLTokenizer(json.dumps(whole), n_vocab=vocab_size, eos_token=list(stop_ids))
    return GrammarVocabulary(tokenizer=tokenizer, stop_ids=frozenset(stop_ids), stops=mask_of(stop_ids, vocab_size))


def _renamed(vocab: Any, names: Mapping[str, str]) -> Any:
    """Return a model's vocabulary, ids by text or [text, score] by id, under other names."""
    if isinstance(vocab, dict):
        return {names.get(text, text): index for text, index in cast("dict[str, int]", vocab).items()}
    if isinstance(vocab, list):
        return [[names.get(text, text), score] for text, score in cast("list[tuple[str, float]]", vocab)]
    return vocab


def read_definition(directory: Path) -> dict[str, Any] | None:
    """Return the content of a model directory's tokenizer.json, None if it has none."""
    path = directory / "tokenizer.json"
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
