"""What each token id says, as bytes: the tables behind detokenization and log-probability entries.

Read once from `tokenizer.json`. Two families of decoders are understood: byte-level (GPT-2, Llama 3, SmolLM2, Qwen,
DeepSeek) and SentencePiece-like (word marker, optional byte fallback). Knows no request and no stop rule.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from core.errors import ConfigError

_WORD_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How token strings become bytes, from the `decoder` entry of tokenizer.json."""

    byte_level: bool
    byte_fallback: bool = False
    strips_leading_space: bool = False
    """The first space of a text that stands alone is an artefact of the word marker."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Per-id tables; ids beyond the tables (padding of the model's head) say nothing."""

    token_bytes: Sequence[bytes]
    """Raw bytes of each id, special tokens included."""
    token_text: Sequence[str | None]
    """The same as text where the bytes are whole characters, else None."""
    special_ids: frozenset[int]
    rules: DecoderRules

    @property
    def size(self) -> int:
        """Number of ids that the tables cover."""
        return len(self.token_bytes)

    def bytes_of(self, token: int) -> bytes:
        """Return the token's bytes; empty for an id outside the tables."""
        return self.token_bytes[token] if 0 <= token < len(self.token_bytes) else b""


@lru_cache(maxsize=256)
def hidden_ids(special: frozenset[int], shown: frozenset[int], silent: frozenset[int]) -> frozenset[int]:
    """Return the ids that never show: special ones but for those shown, and the silent ones.

    Kept, because some vocabularies have a thousand special ids, and requests differ in the few others only.
    """
    return (special - shown) | silent


def byte_alphabet() -> dict[str, int]:
    """Return the printable stand-ins of byte-level BPE: character -> byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return table


def read_rules(decoder: Mapping[str, Any] | None) -> DecoderRules:
    """Understand the decoder entry; `ConfigError` for a kind whose tokens do not map to bytes one by one."""
    steps = _flatten(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderRules(byte_level=True)
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not kinds or not set(kinds) <= known or not {"Replace", "Metaspace"} & set(kinds):
        raise ConfigError(
            f"tokenizer.json has the decoder {kinds or 'null'}; only byte-level and word-marker decoders are supported"
        )
    for step in steps:
        _check_step(step)
    strips = "Strip" in kinds or any(s.get("type") == "Metaspace" and _prepends(s) for s in steps)
    return DecoderRules(byte_level=False, byte_fallback="ByteFallback" in kinds, strips_leading_space=strips)


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in cast("list[Mapping[str, Any]]", decoder["decoders"]) for step in _flatten(inner)]
    return [decoder]


def _prepends(step: Mapping[str, Any]) -> bool:
    return step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"


def _check_step(step: Mapping[str, Any]) -> None:
    kind = step.get("type")
    if kind == "Replace" and (step.get("pattern") != {"String": _WORD_MARK} or step.get("content") != " "):
        raise ConfigError("tokenizer.json has a Replace decoder that does not turn the word marker into a space")
    if kind == "Metaspace" and step.get("replacement") != _WORD_MARK:
        raise ConfigError("tokenizer.json has a Metaspace decoder with an unusual word marker")
    if kind == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
        raise ConfigError("tokenizer.json has a Strip decoder other than one leading space")


def build_vocabulary(
    tokens: Mapping[str, int], added: Mapping[int, tuple[str, bool]], rules: DecoderRules
) -> Vocabulary:
    """Build the tables from token string -> id, and added id -> (content, special)."""
    size = max(max(tokens.values(), default=-1), max(added, default=-1)) + 1
    table: list[bytes] = [b""] * size
    alphabet = byte_alphabet()
    for token, index in tokens.items():
        table[index] = _token_bytes(token, rules, alphabet)
    for index, (content, _special) in added.items():
        table[index] = _token_bytes(content, rules, alphabet)
    return Vocabulary(
        token_bytes=table,
        token_text=[_whole_text(raw) for raw in table],
        special_ids=frozenset(index for index, (_content, special) in added.items() if special),
        rules=rules,
    )


def _token_bytes(token: str, rules: DecoderRules, alphabet: Mapping[str, int]) -> bytes:
    if rules.byte_level:
        # A token with any character outside the alphabet is literal text, as in the reference decoder.
        values = [alphabet.get(char, -1) for char in token]
        return token.encode() if -1 in values else bytes(values)
    match = _BYTE_TOKEN.fullmatch(token) if rules.byte_fallback else None
    return bytes([int(match[1], 16)]) if match else token.replace(_WORD_MARK, " ").encode()


def _whole_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
