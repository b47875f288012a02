import json
import subprocess
import sys

import pytest
import torch

from core.errors import CheckpointError
from engine.models.builtin import prepare_builtin
from engine.models.deepseek_v41.checkpoint import INDEX
from engine.models.deepseek_v41.engram_hash import NgramHash
from engine.models.deepseek_v41.loader import load_weights, open_checkpoint
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config, tiny_config
from engine.models.deepseek_v41.token_map import read_token_map
from engine.models.manifest import read_manifest

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return prepare_builtin("v41-tiny", tmp_path_factory.mktemp("cache"))


def test_the_builtin_is_a_complete_directory(tiny):
    assert {file.name for file in tiny.iterdir() if file.suffix != ".safetensors"} == {
        "config.json",
        "engram_token_map.json",
        INDEX,
        "tandem.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert len(list(tiny.glob("*.safetensors"))) > 1
    assert json.loads((tiny / "config.json").read_bytes()) == tiny_config()


def test_the_builtin_is_small_and_loads(tiny):
    config = parse_config(tiny_config())
    weights = load_weights(tiny, config, torch.float32)
    assert len(weights.layers) == 14 and len(weights.dspark.stages) == 3
    assert sum(file.stat().st_size for file in tiny.iterdir()) < 8 << 20
    assert len(read_token_map(tiny, config.engram, config.vocab_size)) == 512


def test_the_image_encoder_is_part_of_the_checkpoint(tiny):
    checkpoint = open_checkpoint(tiny, parse_config(tiny_config()))
    assert checkpoint.get("vision.blocks.1.attn.wqkv.weight").shape == (192, 64)
    assert checkpoint.get("image_newline").float().std() > 0.5
    norm = checkpoint.get("vision.blocks.0.norm2.weight").float()
    assert abs(float(norm.mean()) - 1) < 0.1 and float(norm.std()) > 0.05
    assert checkpoint.get("aligner.w1.bias").float().abs().max() < 0.5


def test_a_second_call_finds_the_first_ones_directory(tiny):
    before = (tiny / "tandem.json").stat().st_mtime_ns
    assert prepare_builtin("v41-tiny", tiny.parent) == tiny
    assert (tiny / "tandem.json").stat().st_mtime_ns == before


def test_the_revision_is_the_same_on_every_machine(tiny):
    assert read_manifest(tiny).revision == "fd2402cbb3c27d61d6e4bac26a2a0c29d6d22e1c4266681745498266a7354b4c"


def test_a_changed_file_is_refused(tiny):
    path = next(tiny.glob("*.safetensors"))
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="differs from the checksum"):
            read_manifest(tiny)
    finally:
        path.write_bytes(whole)


def test_naming_the_builtins_needs_no_torch():
    code = "import sys, engine.models.builtin as b; assert 'v41-tiny' in b.BUILTIN_NAMES; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("make", [tiny_config, mini_config])
def test_tables_have_as_many_rows_as_the_hash_can_name(make):
    config = parse_config(make())
    assert NgramHash(config.engram, torch.arange(config.vocab_size)).num_rows == config.engram.num_rows
