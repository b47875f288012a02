"""The compressed vocabulary of the n-gram tables: which token ids count as the same word.

Built from a tokenizer as the model was trained, or read from a file of the checkpoint directory. Needs no torch.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Regex, Tokenizer, normalizers

from core.errors import CheckpointError
from engine.models.deepseek_v41.config import EngramConfig

TOKEN_MAP_FILE = "engram_token_map.json"  # noqa: S105 - a file name
"""A list with the compressed id of every token id; where it is absent, the tokenizer decides."""
_UNKNOWN = "\ufffd"
_LONE_SPACE = "\ue000"


def modular_map(vocab_size: int, compressed: int) -> list[int]:
    """Return the map of generated models: the id modulo the size of the compressed vocabulary."""
    return [i % compressed for i in range(vocab_size)]


def build_token_map(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the compressed id of every token id, numbered in the order of first appearance.

    Ids are the same word if their texts agree after case, accents, compatibility forms and runs of white space are
    set aside. Tokens that are not whole characters stand for themselves.
    """
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    seen: dict[str, int] = {}
    result: list[int] = []
    for i in range(vocab_size):
        text = tokenizer.decode([i], skip_special_tokens=False)
        word = tokenizer.id_to_token(i) if _UNKNOWN in text else normalizer.normalize_str(text)
        result.append(seen.setdefault(word or text, len(seen)))
    return result


def read_token_map(directory: Path, config: EngramConfig, vocab_size: int) -> list[int]:
    """Return the map of a model directory; raises `CheckpointError` if it does not fit the configuration.

    The number of compressed ids enters the hash, so a map of another size would look up other rows.
    """
    path = directory / TOKEN_MAP_FILE
    if path.exists():
        token_map = _read(path)
    else:
        path = directory / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        token_map = build_token_map(tokenizer, vocab_size)
    _check(token_map, config, vocab_size, path)
    return token_map


def _read(path: Path) -> list[int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[int])
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check(token_map: Sequence[int], config: EngramConfig, vocab_size: int, path: Path) -> None:
    if len(token_map) != vocab_size:
        raise CheckpointError(f"{path} maps {len(token_map)} token ids, the vocabulary has {vocab_size}")
    count = len(set(token_map))
    if count != config.compressed_vocab_size or set(token_map) != set(range(count)):
        raise CheckpointError(
            f"{path} gives {count} compressed ids, engram_compressed_vocab_size is {config.compressed_vocab_size}"
        )
