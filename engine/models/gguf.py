"""Converts a GGUF file of the Llama architecture into a model directory in Hugging Face's layout, dequantized to float32.

GGUF stores query and key rows with the two members of a rotation pair side by side; they are put back to the half-split
order that `engine.layers.rotary` uses. The tokenizer is rebuilt from the file's metadata. Needs no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.errors import CheckpointError
from engine.models.byte_tokenizer import write_tokenizer_config
from engine.models.safetensors_writer import write_safetensors

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3
"""Token type of special tokens in `tokenizer.ggml.token_type`."""


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Typed access to the key-value part of a file."""

    path: Path
    values: dict[str, Any]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path} has no metadata field {key}")
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            raise CheckpointError(f"metadata field {key} of {self.path} is not of type {kind.__name__}")
        return value


def convert_gguf(source: Path, directory: Path) -> None:
    """Fill an existing directory with config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    Raises `CheckpointError` for anything but a readable GGUF file of a plain Llama with a byte-level BPE tokenizer.
    """
    try:
        reader = GGUFReader(source)
        values = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{source} is not a readable GGUF file: {error}") from error
    meta = _Metadata(source, values)
    tensors = {t.name: t for t in reader.tensors}
    config = _config(meta, tied="output.weight" not in tensors)
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
    _write_tokenizer(meta, directory)
    names = {name: _hf_name(name, source) for name in tensors}
    shapes = {names[name]: tuple(int(n) for n in reversed(t.shape.tolist())) for name, t in tensors.items()}
    write_safetensors(directory / "model.safetensors", shapes, np.float32, _dequantized(tensors, config, source))


def _config(meta: _Metadata, *, tied: bool) -> dict[str, Any]:
    architecture = meta.get("general.architecture", str)
    if architecture != "llama":
        raise CheckpointError(f"{meta.path} has architecture {architecture}; only llama can be converted")
    scaling = meta.get("llama.rope.scaling.type", str, "none")
    if scaling != "none":
        raise CheckpointError(f"{meta.path} uses rope scaling {scaling}, which the conversion does not support")
    heads = meta.get("llama.attention.head_count", int)
    hidden = meta.get("llama.embedding_length", int)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta.get("tokenizer.ggml.tokens", list)),
        "hidden_size": hidden,
        "intermediate_size": meta.get("llama.feed_forward_length", int),
        "num_hidden_layers": meta.get("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", int, heads),
        "head_dim": meta.get("llama.attention.key_length", int, hidden // heads),
        "max_position_embeddings": meta.get("llama.context_length", int),
        "rms_norm_eps": meta.get("llama.attention.layer_norm_rms_epsilon", float),
        "rope_theta": meta.get("llama.rope.freq_base", float, 10_000.0),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "bos_token_id": meta.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id", int),
        "dtype": "float32",
    }


def _hf_name(name: str, source: Path) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK and parts[3] in {"weight", "bias"}:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    raise CheckpointError(f"tensor {name} of {source} is not part of a plain Llama")


def _dequantized(
    tensors: dict[str, ReaderTensor], config: dict[str, Any], source: Path
) -> Iterator[npt.NDArray[np.float32]]:
    for name, tensor in tensors.items():
        try:
            values = cast("npt.NDArray[np.float32]", dequantize(tensor.data, tensor.tensor_type))
        except (ValueError, NotImplementedError) as error:
            raise CheckpointError(f"tensor {name} of {source} cannot be dequantized: {error}") from error
        if ".attn_q." in name:
            values = half_split_rows(values, config["num_attention_heads"])
        elif ".attn_k." in name:
            values = half_split_rows(values, config["num_key_value_heads"])
        yield values


def half_split_rows(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder rows [heads * d, ...] from adjacent rotation pairs (2i, 2i + 1) to halves (i, i + d / 2)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _write_tokenizer(meta: _Metadata, directory: Path) -> None:
    kind = meta.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise CheckpointError(f"{meta.path} has a tokenizer of kind {kind}; only byte-level BPE can be converted")
    tokens = meta.get("tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ")) for merge in meta.get("tokenizer.ggml.merges", list)]
    types = meta.get("tokenizer.ggml.token_type", list)
    special = [token for token, token_type in zip(tokens, types, strict=True) if token_type == _CONTROL_TOKEN]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(meta)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokens[meta.get("tokenizer.ggml.eos_token_id", int)]
    bos = meta.values.get("tokenizer.ggml.bos_token_id")
    write_tokenizer_config(
        directory,
        bos=tokens[bos] if bos is not None else None,
        eos=eos,
        pad=tokens[meta.values.get("tokenizer.ggml.padding_token_id", meta.values["tokenizer.ggml.eos_token_id"])],
        chat_template=meta.values.get("tokenizer.chat_template"),
        add_bos=bool(meta.values.get("tokenizer.ggml.add_bos_token", False)),
        extra=special,
    )


def _pre_tokenizer(meta: _Metadata) -> pre_tokenizers.PreTokenizer:
    kind = meta.get("tokenizer.ggml.pre", str, "gpt-2")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "gpt-2":
        return words
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    raise CheckpointError(f"{meta.path} asks for pre-tokenizer {kind!r}, which the conversion does not support")
