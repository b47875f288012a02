import json
import struct
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import CheckpointError
from engine.models.deepseek_v41.checkpoint import INDEX, PublishedCheckpoint
from engine.models.deepseek_v41.engram_hash import hash_primes
from engine.models.deepseek_v41.exporter import export, readable, write_shards
from engine.models.deepseek_v41.inventory import inventory
from engine.models.deepseek_v41.loader import load_weights, open_checkpoint, read_weights
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.publish import published
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.manifest import write_manifest
from engine.models.registry import load_model
from tests.fakes.deepseek_configs import v4_flash_config, v41_flash_config

torch.set_num_threads(1)


def small_config():
    """The smallest with every kind of tensor."""
    raw = tiny_config()
    raw["text_config"] = {
        **raw["text_config"],
        "num_hidden_layers": 6,
        "compress_ratios": [0, 0, 2, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 3],
        "index_source_layer_ids": [2, 3, 5],
        "candidate_source_layer_id": 3,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [6126],
        "num_nextn_predict_layers": 2,
        "dspark_target_layer_ids": [4, 5],
    }
    return raw


def small_v4_config():
    raw = v4_flash_config()
    sizes = {"hidden_size": 128, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 128, "o_lora_rank": 128}
    sizes |= {"num_attention_heads": 4, "o_groups": 2, "moe_intermediate_size": 128, "vocab_size": 512}
    sizes |= {"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0], "index_n_heads": 4, "index_head_dim": 32}
    return raw | sizes | {"n_routed_experts": 4, "num_experts_per_tok": 2, "index_topk": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("v41")
    export(directory, small_config(), seed=7, shard_bytes=1 << 20)
    return directory


@pytest.fixture
def copy(made, tmp_path):
    """A copy whose files may be damaged."""
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def config():
    return parse_config(small_config())


def shard_of(directory: Path, name: str) -> Path:
    return directory / json.loads((directory / INDEX).read_bytes())["weight_map"][name]


def rewrite(directory: Path, name: str, change) -> None:
    """Replace a shard by one in which `change` was applied to its tensors; checksums are dropped."""
    path = shard_of(directory, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    index = json.loads((directory / INDEX).read_bytes())
    index["metadata"] = {}
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != path.name}
    index["weight_map"] |= dict.fromkeys(tensors, path.name)
    (directory / INDEX).write_text(json.dumps(index))


def assert_same(a, b, path="weights"):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert torch.equal(a, b), path
    elif isinstance(a, tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    elif is_dataclass(a):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")
    else:
        assert a is None and b is None, path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_written_is_read_back_bit_for_bit(made, dtype):
    assert_same(load_weights(made, config(), dtype), readable(random_weights(config(), 7, dtype), config()))


def test_the_files_are_the_inventory_in_order(made):
    index = json.loads((made / INDEX).read_bytes())
    specs = list(inventory(config()))
    assert sorted(index["weight_map"]) == sorted(spec.name for spec in specs)
    assert index["metadata"]["total_size"] == sum(spec.num_bytes for spec in specs)
    assert len(set(index["weight_map"].values())) > 1
    checkpoint = open_checkpoint(made, config())
    assert {spec.name: checkpoint.dtype_of(spec.name) for spec in specs} == {spec.name: spec.dtype for spec in specs}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(made, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    for directory, seed in ((again, 7), (other, 8)):
        directory.mkdir()
        export(directory, small_config(), seed=seed, shard_bytes=1 << 20)
    for file in made.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
    assert (other / "config.json").read_bytes() == (made / "config.json").read_bytes()
    assert shard_of(other, NAME).read_bytes() != shard_of(made, NAME).read_bytes()


def test_projections_of_one_input_lie_behind_each_other(made):
    layer = load_weights(made, config(), torch.float32).layers[2]
    attn, compressor = layer.attn, layer.attn.compressor
    assert attn.wkv.data_ptr() == attn.wq_a.data_ptr() + attn.wq_a.nbytes
    assert compressor.wgate.data_ptr() == compressor.wkv.data_ptr() + compressor.wkv.nbytes


def test_the_ngram_table_is_mapped_and_not_copied(made):
    table = load_weights(made, config(), torch.float32).layers[1].engram.codes
    name = shard_of(made, "layers.1.engram.embed.weight").name
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    assert any(begin <= table.data_ptr() < end for begin, end in ranges)


def test_a_bfloat16_model_keeps_in_float32_what_is_published_so(made):
    layer = load_weights(made, config(), torch.bfloat16).layers[2]
    assert layer.attn.wq_b.dtype == layer.moe.w13.dtype == torch.bfloat16
    assert layer.hc_attn.fn.dtype == layer.attn.sink.dtype == layer.moe.bias.dtype == torch.float32


def test_a_single_file_without_an_index_is_read(made, tmp_path):
    tensors = {}
    for path in made.glob("*.safetensors"):
        tensors |= load_file(path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(load_weights(tmp_path, config(), torch.float32), load_weights(made, config(), torch.float32))


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_a_v4_checkpoint_is_read(tmp_path, expert_dtype):
    raw = small_v4_config() | {"expert_dtype": expert_dtype}
    v4 = parse_config(raw)
    weights = random_weights(v4, 3, torch.float32)
    write_shards(tmp_path, published(weights, v4), 1 << 20)
    assert_same(load_weights(tmp_path, v4, torch.float32), weights)


def test_the_bits_of_experts_are_told_by_their_tensors_and_not_by_the_configuration(tmp_path):
    fp8 = parse_config(small_v4_config() | {"expert_dtype": "fp8"})
    weights = random_weights(fp8, 3, torch.float32)
    write_shards(tmp_path, published(weights, fp8), 1 << 20)
    claims_fp4 = parse_config(small_v4_config() | {"expert_dtype": "fp4"})
    assert_same(load_weights(tmp_path, claims_fp4, torch.float32), weights)


def test_scales_may_be_numbers_instead_of_exponents(copy):
    expected = load_weights(copy, config(), torch.float32)
    name = "layers.0.attn.wq_a.scale"
    rewrite(copy, name, lambda t: t.update({name: t[name].float()}))
    assert_same(load_weights(copy, config(), torch.float32), expected)


def test_packed_experts_may_be_unsigned(copy):
    expected = load_weights(copy, config(), torch.float32)
    name = "layers.0.ffn.experts.0.w1.weight"
    rewrite(copy, name, lambda t: t.update({name: t[name].view(torch.uint8)}))
    assert_same(load_weights(copy, config(), torch.float32), expected)


NAME = "layers.3.attn.indexer.wk.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"tensor {NAME} is missing"),
        (lambda t: t.update(stranger=torch.zeros(2)), "has tensor stranger, which this configuration does not use"),
        (lambda t: t.update({NAME: t[NAME][:-1].clone()}), rf"tensor {NAME} .* has shape \[31, 64\]"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int64)}), rf"tensor {NAME} .* has type I64, expected BF16"),
        (lambda t: t[NAME].fill_(float("nan")), f"tensor {NAME} is corrupted"),
    ],
    ids=["missing", "extra", "mis-shaped", "mis-typed", "not finite"],
)
def test_a_wrong_tensor_is_refused_by_name(copy, change, message):
    rewrite(copy, NAME, change)
    with pytest.raises(CheckpointError, match=message):
        load_weights(copy, config(), torch.float32)


def test_a_dense_weight_with_a_code_for_nan_is_refused_by_name(copy):
    name = "layers.0.attn.wq_a.weight"
    rewrite(copy, name, lambda t: t[name].view(torch.uint8).__setitem__((3, 5), 0x7F))
    with pytest.raises(CheckpointError, match=f"tensor {name} is corrupted"):
        load_weights(copy, config(), torch.float32)


def test_several_missing_tensors_are_counted(copy):
    names = [f"layers.3.attn.indexer.{part}.weight" for part in ("wk", "k_norm", "weights_proj")]
    rewrite(copy, NAME, lambda t: [t.pop(name, None) for name in names])
    with pytest.raises(CheckpointError, match=r"tensor layers\.3\..*\(and 2 more\) is missing"):
        load_weights(copy, config(), torch.float32)


def test_every_truncation_of_a_shard_is_refused_with_a_tensors_name(copy):
    path = shard_of(copy, NAME)
    whole = path.read_bytes()
    names = {n for n, f in json.loads((copy / INDEX).read_bytes())["weight_map"].items() if f == path.name}
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as caught:
            load_weights(copy, config(), torch.float32)
        assert any(f"tensor {name}" in str(caught.value) for name in names), str(caught.value)


def test_the_last_tensor_of_a_truncated_shard_is_the_one_named(copy):
    path = shard_of(copy, NAME)
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])
    header.pop("__metadata__")
    last = max(header, key=lambda name: header[name]["data_offsets"])
    path.write_bytes(whole[:-1])
    with pytest.raises(
        CheckpointError, match=f"truncated: tensor {last} ends at byte {len(whole)} of {len(whole) - 1}"
    ):
        load_weights(copy, config(), torch.float32)


@pytest.mark.parametrize("place", [0, 7, 9, 60])
def test_a_corrupted_header_is_refused_with_a_tensors_name(copy, place):
    path = shard_of(copy, NAME)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 0xFF
    path.write_bytes(bytes(damaged))
    with pytest.raises(CheckpointError, match="tensor "):
        load_weights(copy, config(), torch.float32)


def test_one_flipped_bit_is_refused_with_the_tensors_name(copy):
    path = shard_of(copy, NAME)
    damaged = bytearray(path.read_bytes())
    begin = 8 + struct.unpack("<Q", damaged[:8])[0]
    offset = json.loads(bytes(damaged[8:begin]))[NAME]["data_offsets"][0]
    damaged[begin + offset] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(CheckpointError, match=f"tensor {NAME} .* is corrupted: its checksum differs"):
        load_weights(copy, config(), torch.float32)
    load_weights(copy, config(), torch.float32, verify=False)


def test_a_missing_shard_is_refused_with_a_tensors_name(copy):
    shard_of(copy, NAME).unlink()
    with pytest.raises(CheckpointError, match=r"which holds tensor .*, does not exist"):
        load_weights(copy, config(), torch.float32)


def test_an_index_that_is_not_json_is_refused(copy):
    (copy / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        load_weights(copy, config(), torch.float32)


def test_an_index_must_not_point_outside(copy):
    index = json.loads((copy / INDEX).read_bytes())
    index["weight_map"][NAME] = "../" + index["weight_map"][NAME]
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names a shard outside"):
        PublishedCheckpoint(copy)


def test_a_tensor_in_two_shards_is_refused(copy):
    names = json.loads((copy / INDEX).read_bytes())["weight_map"]
    other = next(name for name in names if names[name] != names[NAME])
    rewrite(copy, other, lambda t: t.update({NAME: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=f"tensor {NAME} is in .* and again in"):
        PublishedCheckpoint(copy)


def test_experts_outside_the_model_are_refused_in_a_table_of_token_ids(tmp_path):
    v4 = parse_config(small_v4_config())
    tensors = dict(published(random_weights(v4, 3, torch.float32), v4))
    tensors["layers.1.ffn.gate.tid2eid"] = torch.full((512, 2), 4)

    class Source:
        def get(self, name):
            return tensors[name]

    with pytest.raises(CheckpointError, match=r"tensor layers\.1\.ffn\.gate\.tid2eid names experts outside 0\.\.3"):
        read_weights(Source(), v4, torch.float32)


def test_tables_of_another_height_than_the_hash_needs_are_refused(made):
    raw = small_config()
    raw["text_config"] |= {"engram_num_embeddings": [6127]}
    with pytest.raises(CheckpointError, match=r"engram_num_embeddings is \[6127\], the hash needs \[6126\]"):
        open_checkpoint(made, parse_config(raw))


def test_the_heights_of_the_real_tables_are_what_the_hash_needs():
    engram = parse_config(v41_flash_config()).engram
    assert tuple(sum(primes) for primes in hash_primes(engram)) == engram.num_rows


def test_the_registry_names_the_damaged_tensor(copy):
    write_manifest(copy, "damaged")
    path = shard_of(copy, NAME)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated: tensor "):
        load_model(copy)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="tensor .* is corrupted: its checksum differs"):
        load_model(copy)
