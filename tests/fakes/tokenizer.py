"""Small tokenizers built on the spot: a byte-level one like SmolLM2's and a SentencePiece-like one with byte fallback.

Both come as model directories (tokenizer.json, tokenizer_config.json with a ChatML template, generation_config.json).
"""

import datetime as dt
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.text.tokenizer import Tokenizer, load_tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. Hello world, hello there! The capital of France is Paris.",
    "One two three four five six seven eight nine ten; the end of the beginning of the end.",
    "Grüße aus Köln, señor. 你好，世界 🌍 naïve café",
)


def byte_level_definition(vocab_size: int = 400) -> dict:
    """A byte-level BPE: all 256 bytes, some merges, the three specials first."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return json.loads(tokenizer.to_str())


def byte_fallback_definition() -> dict:
    """A Llama-2-like tokenizer: word marker, byte fallback, one leading space stripped on decoding."""
    words = ["\u2581", "\u2581the", "\u2581hello", "\u2581world", "he", "llo", "a", "b", "c", "d", "e", "h", "l", "o"]
    words += ["r", "t", "w", "!", "é", "\n", "<", ">", "|", "_", "i", "m", "n", "s", "u"]
    vocab: dict[str, int] = {"<unk>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for word in words:
        vocab.setdefault(word, len(vocab))
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("t", "he"), ("\u2581", "the"), ("\u2581", "hello")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<|im_start|>", "<|im_end|>")])
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return json.loads(tokenizer.to_str())


def write_model_directory(directory: Path, definition: dict, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the files a gateway reads."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(definition))
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def fixed_now() -> dt.datetime:
    """A wall clock that stands still."""
    return dt.datetime(2026, 2, 3, 4, 5, 6, tzinfo=dt.UTC)


def build_tokenizer(
    directory: Path, definition: dict | None = None, *, template: str | None = CHAT_TEMPLATE
) -> Tokenizer:
    """Write and load a tokenizer (byte-level unless told otherwise)."""
    write_model_directory(directory, definition or byte_level_definition(), template=template)
    return load_tokenizer(directory, fixed_now)
