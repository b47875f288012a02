import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from benchmarks.model_driver import ModelDriver
from core.errors import CheckpointError
from engine.models.builtin import prepare_builtin
from engine.models.loader import Checkpoint
from engine.models.random_weights import RandomWeights
from engine.models.registry import load_model

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return prepare_builtin("tiny-llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def directory(source, tmp_path):
    """A copy without checksums, as users' directories are."""
    copy = tmp_path / "model"
    shutil.copytree(source, copy)
    (copy / "tandem.json").unlink()
    return copy


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_directory_without_manifest_loads_and_is_named_after_itself(directory, source):
    model = load_model(directory)
    assert model.facts.name == "model"
    assert model.facts.revision == load_model(source).facts.revision


def test_revision_follows_the_weights(directory, source):
    change_tensors(directory, lambda t: t.update({"model.norm.weight": t["model.norm.weight"] * 2}))
    assert load_model(directory).facts.revision != load_model(source).facts.revision


def test_a_missing_tensor_is_named(directory):
    change_tensors(directory, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load_model(directory)


def test_a_tensor_that_nobody_uses_is_named(directory):
    change_tensors(directory, lambda t: t.update({"model.layers.9.extra": np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.extra"):
        load_model(directory)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(directory):
    change_tensors(directory, lambda t: t.update({"model.norm.weight": np.zeros(63, np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[63\].*\[64\]"):
        load_model(directory)


def test_a_tensor_of_integers_is_refused(directory):
    change_tensors(directory, lambda t: t.update({"model.norm.weight": np.zeros(64, np.int32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*int32"):
        load_model(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_refused(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or corrupted"):
        load_model(directory)


def test_a_flipped_header_bit_is_refused(directory):
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[9] ^= 0x40
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError):
        load_model(directory)


def test_a_flipped_weight_bit_is_found_by_the_checksums_and_only_by_them(source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors differs"):
        load_model(copy)
    load_model(copy, verify=False)


def test_a_file_that_vanished_is_named(source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_model(copy)


def test_a_missing_directory_is_one_plain_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("architectures", ["GptFiveForCausalLM"], "GptFiveForCausalLM"),
        ("hidden_size", "wide", "hidden_size"),
        ("hidden_size", None, "hidden_size"),
        ("num_key_value_heads", 3, "do not divide"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "dynamic"),
        ("layer_types", ["sliding_attention"] * 4, "sliding_window"),
        ("hidden_act", "gelu", "gelu"),
        ("dtype", "int8", "int8"),
        ("vocab_size", 321, "embed_tokens"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(directory, field, value, words):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config[field] = value
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        load_model(directory)


def test_a_configuration_that_is_no_json_is_refused(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model(directory)


def split_in_shards(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in part}, directory / f"part-{i}.safetensors")
        where |= dict.fromkeys(part, f"part-{i}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def test_shards_give_the_same_model(directory, source):
    split_in_shards(directory)
    sharded, single = (ModelDriver(load_model(d)).step({0: [1, 2, 3]}) for d in (directory, source))
    assert torch.equal(sharded, single)


def test_an_index_that_points_to_the_wrong_shard_is_refused(directory):
    where = split_in_shards(directory)
    where["model.norm.weight"] = f"part-{1 - int(where['model.norm.weight'][5])}.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        load_model(directory)


def test_a_missing_shard_is_named(directory):
    split_in_shards(directory)
    (directory / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors does not exist"):
        load_model(directory)


def test_weights_of_the_wanted_type_are_views_of_the_mapped_file(source):
    def mapped(tensor):
        with Path("/proc/self/maps").open() as maps:
            for line in maps:
                low, high = (int(x, 16) for x in line.split()[0].split("-"))
                if low <= tensor.data_ptr() < high:
                    return "model.safetensors" in line
        return False

    assert mapped(Checkpoint(source, torch.float32).take("lm_head.weight", (320, 64)))
    assert not mapped(Checkpoint(source, torch.float64).take("lm_head.weight", (320, 64)))


def test_another_dtype_can_be_asked_for(source):
    model = load_model(source, dtype="f64", name="other")
    assert (model.facts.kv_dtype, model.facts.name) == ("f64", "other")
    assert ModelDriver(model).step({0: [1, 2]}).dtype is torch.float64
    assert ModelDriver(load_model(source, dtype="bf16")).step({0: [1, 2]}).dtype is torch.float32
    with pytest.raises(CheckpointError, match="fp8"):
        load_model(source, dtype="fp8")


def test_random_weights_depend_on_seed_and_name_only_and_are_refused_on_a_cpu(tmp_path):
    one, same, other = (RandomWeights(seed, torch.float32, torch.device("cpu")) for seed in (1, 1, 2))
    drawn = one.take("a.weight", (64, 256))
    one.take("b.weight", (3, 3))
    assert torch.equal(drawn, same.take("a.weight", (64, 256)))
    assert not torch.equal(drawn, other.take("a.weight", (64, 256)))
    assert not torch.equal(drawn, one.take("c.weight", (64, 256)))
    assert 0.9 < float(drawn.std()) * 16 < 1.1
    assert one.take("norm", (5,)).tolist() == [1.0] * 5
    with pytest.raises(CheckpointError, match="set model.device to cuda"):
        load_model(prepare_builtin("llama-8b-random", tmp_path))
