"""Tokenizer and chat files of generated models: one token per byte, and the special tokens of DeepSeek's chat format.

Ids 0..2 are begin, end and pad, then come the 256 bytes, the special tokens, and reserved ones up to the vocabulary;
the image token has the id that the configuration gives it. Needs no torch.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.errors import InvariantError
from engine.models.byte_tokenizer import byte_alphabet
from engine.models.deepseek_v41.config import V41Config

_BAR, _GAP = "\uff5c", "\u2581"
"""The full-width bar and the lower block of DeepSeek's special spellings."""


def _mark(text: str) -> str:
    return f"<{_BAR}{text.replace(' ', _GAP)}{_BAR}>"


BOS, EOS, PAD, IMAGE = (_mark(text) for text in ("begin of sentence", "end of sentence", " pad ", "image"))
THINK_END = "</think>"
CHAT = (
    _mark("User"),
    _mark("Assistant"),
    _mark("System"),
    "<think>",
    THINK_END,
    f"{_BAR}DSML{_BAR}",
    _mark("latest_reminder"),
)
"""Not marked as special in the published tokenizer: they are part of an answer's text until somebody reads it."""
GROUNDING = tuple(_mark(f"{slash}{kind}") for kind in ("ref", "box", "point", "polygon") for slash in ("", "/"))
FIRST_BYTE = 3
_LETTERS = b"abcdefghijklmnopqrstuvwxyz ,."


def token_ids(config: V41Config) -> dict[str, int]:
    """Return the id of every token of the vocabulary by its spelling."""
    ids = {BOS: 0, EOS: 1, PAD: 2}
    ids |= {char: FIRST_BYTE + byte for byte, char in enumerate(byte_alphabet())}
    ids |= {text: len(ids) + i for i, text in enumerate((*CHAT, *GROUNDING))}
    if config.image_token_id is None or not len(ids) <= config.image_token_id < config.vocab_size:
        raise InvariantError(f"image_token_id {config.image_token_id} leaves no room for {len(ids)} tokens")
    taken = len(ids)
    ids[IMAGE] = config.image_token_id
    ids |= {_mark(f"reserved {i}"): i for i in range(taken, config.vocab_size) if i != config.image_token_id}
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def write_tokenizer(directory: Path, config: V41Config) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    ids = token_ids(config)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = set(byte_alphabet())
    added = [text for text in ids if text not in alphabet]
    tokenizer.add_tokens([AddedToken(text, special=text not in CHAT, normalized=False) for text in added])
    tokenizer.save(str(directory / "tokenizer.json"))
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def loudness(config: V41Config) -> list[float]:
    """Return a factor per token for the rows of a random head: letters and the end of reasoning are likely, ends
    of text now and then, the rest rare.

    Powers of two, so that scaled weights stay exact.
    """
    ids = token_ids(config)
    factors = [0.25] * config.vocab_size
    for byte in _LETTERS:
        factors[FIRST_BYTE + byte] = 4.0
    factors[ids[THINK_END]] = 4.0
    factors[ids[EOS]] = 2.0
    return factors
