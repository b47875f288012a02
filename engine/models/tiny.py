"""Seeded Llama checkpoints small enough for any test: random weights that are the same on every machine.

`tiny-llama` has full attention only; in `tiny-window` the second layer slides over a window of 24 tokens and keeps its
KV in a ring per row. Needs no torch.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from engine.models.byte_tokenizer import IM_END, write_byte_tokenizer

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS, _VOCAB = 64, 160, 4, 2, 16, 4, 320
WINDOW = 24
"""Sliding window of tiny-window, in tokens."""
_DTYPES = {"f32": ("float32", np.float32), "f64": ("float64", np.float64)}


def tiny_config(dtype: str, *, windowed: bool, max_positions: int = 4096) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    kinds = ["sliding_attention" if windowed and i == 1 else "full_attention" for i in range(_LAYERS)]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": IM_END,
        "dtype": _DTYPES[dtype][0],
        **({"sliding_window": WINDOW, "layer_types": kinds} if windowed else {}),
    }


def tiny_tensors(dtype: str, seed: int = 20_261) -> dict[str, npt.NDArray[Any]]:
    """Return the weights: drawn in float64 from a fixed bit stream, so f32 is the rounding of f64.

    The spreads keep attention and logits far from both uniform and constant, so that greedy text varies and depends
    on the whole context.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    query, kv = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM

    def normal(*shape: int, spread: float) -> npt.NDArray[Any]:
        # Sums of uniforms: exact arithmetic on every platform, unlike a library's normal deviates.
        return (generator.random((4, *shape)).sum(0) - 2) * (spread * 3**0.5)

    tensors = {
        "model.embed_tokens.weight": normal(_VOCAB, _HIDDEN, spread=1.0),
        "model.norm.weight": 1 + normal(_HIDDEN, spread=0.1),
        "lm_head.weight": normal(_VOCAB, _HIDDEN, spread=0.4) * _loudness()[:, None],
    }
    for i in range(_LAYERS):
        at = f"model.layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": 1 + normal(_HIDDEN, spread=0.1),
            f"{at}.self_attn.q_proj.weight": normal(query, _HIDDEN, spread=0.4),
            f"{at}.self_attn.k_proj.weight": normal(kv, _HIDDEN, spread=0.25),
            f"{at}.self_attn.v_proj.weight": normal(kv, _HIDDEN, spread=0.25),
            f"{at}.self_attn.o_proj.weight": normal(_HIDDEN, query, spread=0.25),
            f"{at}.post_attention_layernorm.weight": 1 + normal(_HIDDEN, spread=0.1),
            f"{at}.mlp.gate_proj.weight": normal(_INNER, _HIDDEN, spread=0.2),
            f"{at}.mlp.up_proj.weight": normal(_INNER, _HIDDEN, spread=0.2),
            f"{at}.mlp.down_proj.weight": normal(_HIDDEN, _INNER, spread=0.12),
        }
    return {name: np.ascontiguousarray(tensor.astype(_DTYPES[dtype][1])) for name, tensor in tensors.items()}


def _loudness() -> npt.NDArray[Any]:
    """Return a factor per token: letters are likely, end of text now and then, the rest rare. Makes text readable."""
    loudness = np.full(_VOCAB, 0.1)
    loudness[list(b"abcdefghijklmnopqrstuvwxyz ,.")] = 1.0
    loudness[IM_END] = 0.7
    return loudness


def write_tiny(directory: Path, dtype: str, *, windowed: bool, max_positions: int = 4096) -> None:
    """Write a complete tiny model into an existing directory."""
    config = tiny_config(dtype, windowed=windowed, max_positions=max_positions)
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
    save_file(tiny_tensors(dtype), directory / "model.safetensors")
    write_byte_tokenizer(directory, _VOCAB)
