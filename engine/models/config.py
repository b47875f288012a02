"""What a Llama-family checkpoint's config.json says, checked and put into our own words. Knows no tensors."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.errors import CheckpointError
from engine.layers.rotary import RopeScaling

Positive = Annotated[int, Meta(ge=1)]


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and rules of one model."""

    architecture: str
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    max_positions: Positive
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]
    """Per layer: sliding window in tokens, 0 for full attention."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """f32, f64 or bf16: what the checkpoint says it is."""


class _Raw(msgspec.Struct, kw_only=True):
    """The fields of config.json that matter, under Hugging Face's names; others are ignored."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Positive
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    eos_token_id: int | list[int] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None


_DTYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f32"}
"""float16 checkpoints run in float32: KV and sums would overflow."""

_ROPE_KINDS = {"default": "default", "linear": "linear", "llama3": "banded", "yarn": "yarn"}
"""Hugging Face's names of rope scalings, and ours."""


def parse_llama(config: dict[str, Any], path: Path) -> LlamaConfig:
    """Read a parsed config.json; raises `CheckpointError` naming the field. `path` is for the message only."""
    try:
        raw = msgspec.convert(config, _Raw)
        scaling, theta = _rope(raw)
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"{path} is not a Llama configuration: {error}") from error
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    architecture = str(config["architectures"][0])
    if raw.hidden_act != "silu":
        raise CheckpointError(f"{path}: hidden_act {raw.hidden_act!r} is not supported, only 'silu'")
    if raw.num_attention_heads % kv_heads:
        raise CheckpointError(f"{path}: {raw.num_attention_heads} heads do not divide over {kv_heads} key-value heads")
    head_dim = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    if head_dim % 2:
        raise CheckpointError(f"{path}: head_dim {head_dim} is odd; rotary pairs need an even one")
    dtype = raw.dtype or raw.torch_dtype or "float32"
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path}: dtype {dtype!r} is not supported; known are {', '.join(_DTYPES)}")
    eos = raw.eos_token_id
    return LlamaConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=raw.max_position_embeddings,
        norm_eps=raw.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tied_head=raw.tie_word_embeddings,
        # Qwen2's query, key and value biases are part of the architecture, not of the configuration.
        qkv_bias=raw.attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias,
        windows=_windows(raw, architecture, path),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        dtype=_DTYPES[dtype],
    )


def _rope(raw: _Raw) -> tuple[RopeScaling, float]:
    """Return scaling and base; accepts the old pair of fields and the newer `rope_parameters`."""
    fields = dict(raw.rope_parameters or raw.rope_scaling or {})
    theta = float(fields.get("rope_theta") or raw.rope_theta or 10_000.0)
    kind = str(fields.get("rope_type") or fields.get("type") or "default")
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope scaling {kind!r} is not supported; known are {', '.join(_ROPE_KINDS)}")
    original = int(fields.get("original_max_position_embeddings") or raw.max_position_embeddings)
    known = {
        "factor": fields.get("factor"),
        "low_freq_factor": fields.get("low_freq_factor"),
        "high_freq_factor": fields.get("high_freq_factor"),
        "beta_fast": fields.get("beta_fast"),
        "beta_slow": fields.get("beta_slow"),
        "attention_factor": fields.get("attention_factor"),
        "mscale": fields.get("mscale"),
        "mscale_all_dim": fields.get("mscale_all_dim"),
        "truncate": fields.get("truncate"),
    }
    given = {name: value for name, value in known.items() if value is not None}
    scaling = msgspec.convert(
        {"kind": _ROPE_KINDS[kind], "original_max_positions": original, **given},
        RopeScaling,
        str_keys=True,
        strict=False,
    )
    return scaling, theta


def _windows(raw: _Raw, architecture: str, path: Path) -> tuple[int, ...]:
    count, window = raw.num_hidden_layers, raw.sliding_window or 0
    if raw.layer_types is not None:
        unknown = sorted(set(raw.layer_types) - {"full_attention", "sliding_attention"})
        if len(raw.layer_types) != count or unknown:
            raise CheckpointError(f"{path}: layer_types must name full_attention or sliding_attention {count} times")
        if "sliding_attention" in raw.layer_types and window < 1:
            raise CheckpointError(f"{path}: layer_types has sliding_attention but sliding_window is not set")
        return tuple(window if kind == "sliding_attention" else 0 for kind in raw.layer_types)
    if architecture == "MistralForCausalLM":
        return (window,) * count
    if architecture == "Qwen2ForCausalLM" and raw.use_sliding_window:
        first = raw.max_window_layers if raw.max_window_layers is not None else count
        return tuple(window if i >= first else 0 for i in range(count))
    return (0,) * count
