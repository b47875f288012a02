"""Reads config.json of a DeepSeek checkpoint: V4.1's nested form and V4's flat one, under the published names."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.errors import CheckpointError
from engine.models.deepseek_v41.config import (
    CandidateConfig,
    DsparkConfig,
    EngramConfig,
    IndexConfig,
    MhcConfig,
    MoeConfig,
    QuantConfig,
    V41Config,
    VisionConfig,
    YarnScaling,
)
from engine.models.deepseek_v41.layer_map import LayerPlan, Sources, build_layers, build_stages, build_v4_layers

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]

V41_ARCHITECTURE = "DeepseekV41ForCausalLM"
V4_ARCHITECTURE = "DeepseekV4ForCausalLM"


class _Text(msgspec.Struct, kw_only=True):
    """Text fields under their published names; others are ignored."""

    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Positive
    moe_intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive = 1
    head_dim: Positive
    qk_rope_head_dim: Positive
    q_lora_rank: Positive
    o_lora_rank: Positive
    o_groups: Positive
    sliding_window: Positive
    max_position_embeddings: Positive
    rms_norm_eps: float
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rope_scaling: dict[str, Any] | None = None
    compress_ratios: list[Count]
    kv_source_layer_ids: list[Count] = []
    index_source_layer_ids: list[Count] = []
    index_k_source_layer_ids: list[Count] | None = None
    index_n_heads: Positive
    index_head_dim: Positive
    index_topk: Positive
    candidate_source_layer_id: Count | None = None
    candidate_topk_blocks: Positive | None = None
    candidate_block_size: Positive | None = None
    hc_mult: Positive
    hc_sinkhorn_iters: Positive
    hc_eps: float
    hc_shifted: bool = True
    n_routed_experts: Positive
    n_shared_experts: Positive = 1
    num_experts_per_tok: Positive
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    swiglu_limit: float
    gate_temp: float = 1.0
    num_hash_layers: Count = 0
    engram_layer_ids: list[Count] = []
    engram_num_embeddings: list[Positive] = []
    engram_max_ngram_size: Positive = 4
    engram_vocab_size: Positive = 1
    engram_n_heads: Positive = 1
    engram_head_dim: Positive = 1
    engram_pad_token_id: Count = 0
    engram_compressed_vocab_size: Positive = 1
    num_nextn_predict_layers: Count = 0
    dspark_block_size: Positive | None = None
    dspark_noise_token_id: Count = 0
    dspark_target_layer_ids: list[Count] = []
    dspark_markov_rank: Positive = 1
    dspark_n_routed_experts: Positive = 1
    dspark_num_experts_per_tok: Positive = 1
    dspark_target_attn_input: bool = True
    use_fp4_sparse_kv: bool = True
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    hidden_act: str = "silu"


class _Vision(msgspec.Struct, kw_only=True):
    num_hidden_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    patch_size: Positive
    rope_theta: float = 10_000.0
    downsample_ratio: Positive = 3
    max_image_tokens: Positive
    min_pixels: Positive
    max_wh_ratio: float | None = None
    rms_norm_eps: float = 1e-6


class _Quant(msgspec.Struct, kw_only=True):
    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[Positive, Positive]
    scale_fmt: str = "ue8m0"
    expert_dtype: str | None = None


class _Root(msgspec.Struct, kw_only=True):
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    image_token_id: int | None = None
    expert_dtype: str | None = None
    quantization_config: _Quant


def parse_config(config: dict[str, Any], where: str = "config.json") -> V41Config:
    """Read a parsed config.json; raises `CheckpointError` that begins with `where` and names the field."""
    try:
        return _parse(config)
    except (msgspec.ValidationError, CheckpointError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _parse(config: dict[str, Any]) -> V41Config:
    architecture = str((config.get("architectures") or ["(none)"])[0])
    if architecture not in (V41_ARCHITECTURE, V4_ARCHITECTURE):
        raise CheckpointError(f"architecture {architecture} is not {V41_ARCHITECTURE} or {V4_ARCHITECTURE}")
    is_v4 = architecture == V4_ARCHITECTURE
    text = config.get("text_config") or config
    raw = msgspec.convert({**text, "rope_scaling": _rope_fields(text)}, _Text)
    root = msgspec.convert({**text, **config}, _Root)
    _check(raw, root.quantization_config, is_v4)
    layers = _layers(raw, is_v4)
    dspark = _dspark(raw)
    stages = dspark.num_stages if dspark else 0
    eos = root.eos_token_id
    return V41Config(
        architecture=architecture,
        is_v4=is_v4,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        head_dim=raw.head_dim,
        rope_dim=raw.qk_rope_head_dim,
        q_lora_rank=raw.q_lora_rank,
        o_lora_rank=raw.o_lora_rank,
        o_groups=raw.o_groups,
        window=raw.sliding_window,
        norm_eps=raw.rms_norm_eps,
        rope_theta=raw.rope_theta,
        compress_rope_theta=raw.compress_rope_theta,
        rope_scaling=_scaling(raw),
        max_positions=raw.max_position_embeddings,
        q_head_norm=is_v4,
        bos_token_id=root.bos_token_id,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        pad_token_id=root.pad_token_id,
        image_token_id=root.image_token_id,
        layers=layers,
        stages=build_stages(raw.num_hidden_layers, stages),
        index=IndexConfig(
            num_heads=raw.index_n_heads,
            head_dim=raw.index_head_dim,
            top_k=raw.index_topk,
            hadamard=is_v4,
            own_compressor=is_v4,
        ),
        candidates=_candidates(raw),
        mhc=MhcConfig(
            mult=raw.hc_mult,
            sinkhorn_iters=raw.hc_sinkhorn_iters,
            eps=raw.hc_eps,
            pre_from_prev=not is_v4,
        ),
        moe=_moe(raw, is_v4),
        engram=_engram(raw),
        dspark=dspark,
        num_mtp_layers=0 if dspark else raw.num_nextn_predict_layers,
        vision=_vision(config.get("vision_config")),
        quant=_quant(raw, root, is_v4),
    )


def _check(raw: _Text, quant: _Quant, is_v4: bool) -> None:
    fixed = {
        "num_key_value_heads": (raw.num_key_value_heads, 1),
        "n_shared_experts": (raw.n_shared_experts, 1),
        "scoring_func": (raw.scoring_func, "sqrtsoftplus"),
        "topk_method": (raw.topk_method, "noaux_tc"),
        "tie_word_embeddings": (raw.tie_word_embeddings, False),
        "attention_bias": (raw.attention_bias, False),
        "attention_dropout": (raw.attention_dropout, 0.0),
        "hidden_act": (raw.hidden_act, "silu"),
        "hc_shifted": (raw.hc_shifted, True),
        "dspark_target_attn_input": (raw.dspark_target_attn_input, True),
        "quantization_config.quant_method": (quant.quant_method, "fp8"),
        "quantization_config.activation_scheme": (quant.activation_scheme, "dynamic"),
        "quantization_config.scale_fmt": (quant.scale_fmt, "ue8m0"),
    }
    for name, (value, supported) in fixed.items():
        if value != supported:
            raise CheckpointError(f"{name} {value!r} is not supported, only {supported!r}")
    count = raw.num_hidden_layers
    if len(raw.compress_ratios) not in (count, count + raw.num_nextn_predict_layers):
        raise CheckpointError(f"compress_ratios has {len(raw.compress_ratios)} entries for {count} layers")
    if any(raw.compress_ratios[count:]):
        raise CheckpointError("compress_ratios gives a draft layer a global part")
    if raw.qk_rope_head_dim % 2 or raw.qk_rope_head_dim > raw.head_dim:
        raise CheckpointError(f"qk_rope_head_dim {raw.qk_rope_head_dim} is odd or exceeds head_dim {raw.head_dim}")
    if raw.qk_rope_head_dim > raw.index_head_dim:
        raise CheckpointError(
            f"index_head_dim {raw.index_head_dim} is less than the {raw.qk_rope_head_dim} rotary ones"
        )
    if raw.num_attention_heads % raw.o_groups:
        raise CheckpointError(f"{raw.num_attention_heads} heads do not divide over {raw.o_groups} output groups")
    if raw.num_experts_per_tok > raw.n_routed_experts:
        raise CheckpointError(f"{raw.num_experts_per_tok} of {raw.n_routed_experts} experts cannot be chosen")
    if not is_v4 and raw.num_hash_layers:
        raise CheckpointError("num_hash_layers is not supported for V4.1")


def _layers(raw: _Text, is_v4: bool) -> tuple[LayerPlan, ...]:
    ratios = tuple(raw.compress_ratios[: raw.num_hidden_layers])
    if is_v4:
        return build_v4_layers(ratios, raw.num_hash_layers)
    keys = raw.index_k_source_layer_ids
    return build_layers(
        Sources(
            ratios=ratios,
            kv=tuple(raw.kv_source_layer_ids),
            index=tuple(raw.index_source_layer_ids),
            index_keys=None if keys is None else tuple(keys),
            candidate=raw.candidate_source_layer_id,
            engram=tuple(raw.engram_layer_ids),
            captured=tuple(raw.dspark_target_layer_ids),
        )
    )


def _rope_fields(text: dict[str, Any]) -> dict[str, Any] | None:
    """Return the scaling fields wherever a transcription has them: `rope_scaling`, or the newer `rope_parameters`."""
    fields = text.get("rope_scaling") or text.get("rope_parameters")
    return fields.get("compress", fields) if isinstance(fields, dict) else None


def _scaling(raw: _Text) -> YarnScaling | None:
    fields = raw.rope_scaling
    if fields is None:
        return None
    kind = fields.get("type") or fields.get("rope_type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise CheckpointError(f"rope_scaling type {kind!r} is not supported, only 'yarn'")
    original = fields.get("original_max_position_embeddings")
    names = ("factor", "beta_fast", "beta_slow")
    known = {name: fields[name] for name in names if name in fields}
    return msgspec.convert(
        {"beta_fast": 32, "beta_slow": 1, **known, "original_max_positions": original}, YarnScaling, strict=True
    )


def _candidates(raw: _Text) -> CandidateConfig | None:
    source, blocks, size = raw.candidate_source_layer_id, raw.candidate_topk_blocks, raw.candidate_block_size
    if source is None:
        return None
    if blocks is None or size is None:
        raise CheckpointError("candidate_source_layer_id needs candidate_topk_blocks and candidate_block_size")
    if (blocks - 1) * size + 1 < raw.index_topk:
        raise CheckpointError(f"{blocks} candidate blocks of {size} entries cannot fill a top-k of {raw.index_topk}")
    return CandidateConfig(source=source, top_blocks=blocks, block_size=size)


def _moe(raw: _Text, is_v4: bool) -> MoeConfig:
    return MoeConfig(
        num_experts=raw.n_routed_experts,
        num_shared=raw.n_shared_experts,
        top_k=raw.num_experts_per_tok,
        inner_size=raw.moe_intermediate_size,
        route_scale=raw.routed_scaling_factor,
        norm_top_k=raw.norm_topk_prob,
        weight_eps=0.0 if is_v4 else 1e-20,
        swiglu_limit=raw.swiglu_limit,
        gate_temp=raw.gate_temp,
        num_hash_layers=raw.num_hash_layers,
        image_bias=not is_v4,
    )


def _engram(raw: _Text) -> EngramConfig | None:
    if not raw.engram_layer_ids:
        return None
    if len(raw.engram_num_embeddings) != len(raw.engram_layer_ids):
        raise CheckpointError("engram_num_embeddings and engram_layer_ids differ in length")
    if raw.engram_pad_token_id >= raw.vocab_size:
        raise CheckpointError(f"engram_pad_token_id {raw.engram_pad_token_id} is outside the vocabulary")
    return EngramConfig(
        layers=tuple(raw.engram_layer_ids),
        num_rows=tuple(raw.engram_num_embeddings),
        max_ngram=raw.engram_max_ngram_size,
        vocab_size=raw.engram_vocab_size,
        num_heads=raw.engram_n_heads,
        head_dim=raw.engram_head_dim,
        pad_token_id=raw.engram_pad_token_id,
        compressed_vocab_size=raw.engram_compressed_vocab_size,
    )


def _dspark(raw: _Text) -> DsparkConfig | None:
    if raw.dspark_block_size is None or not raw.num_nextn_predict_layers or not raw.dspark_target_layer_ids:
        return None
    if raw.dspark_noise_token_id >= raw.vocab_size:
        raise CheckpointError(f"dspark_noise_token_id {raw.dspark_noise_token_id} is outside the vocabulary")
    return DsparkConfig(
        num_stages=raw.num_nextn_predict_layers,
        block_size=raw.dspark_block_size,
        noise_token_id=raw.dspark_noise_token_id,
        target_layers=tuple(raw.dspark_target_layer_ids),
        markov_rank=raw.dspark_markov_rank,
        num_experts=raw.dspark_n_routed_experts,
        top_k=raw.dspark_num_experts_per_tok,
    )


def _vision(fields: dict[str, Any] | None) -> VisionConfig | None:
    if fields is None:
        return None
    raw = msgspec.convert(fields, _Vision)
    return VisionConfig(
        num_layers=raw.num_hidden_layers,
        hidden_size=raw.hidden_size,
        num_heads=raw.num_attention_heads,
        inner_size=raw.intermediate_size,
        patch_size=raw.patch_size,
        rope_theta=raw.rope_theta,
        downsample_ratio=raw.downsample_ratio,
        max_image_tokens=raw.max_image_tokens,
        min_pixels=raw.min_pixels,
        max_wh_ratio=raw.max_wh_ratio,
        norm_eps=raw.rms_norm_eps,
    )


def _quant(raw: _Text, root: _Root, is_v4: bool) -> QuantConfig:
    rows, columns = root.quantization_config.weight_block_size
    dtype = root.quantization_config.expert_dtype or root.expert_dtype or "fp8"
    if dtype not in ("fp4", "fp8"):
        raise CheckpointError(f"expert_dtype {dtype!r} is not supported, only 'fp4' and 'fp8'")
    return QuantConfig(
        block=(rows, columns),
        activation_group=columns,
        expert_dtype=dtype,
        fp4_sparse_kv=not is_v4 and raw.use_fp4_sparse_kv,
    )
