"""Weights of DeepSeek-V4.1 (and V4) by our own names: plain tensors, dequantized to the compute dtype, ready for the blocks.

Filled by the loader, written by the exporter, drawn by `random_weights`. Every linear is [out, in] and is applied as
x W^T without bias. Knows no file, no checkpoint name and no arithmetic.

Shape legend: d hidden, hc streams, H heads, D head dim, G output groups, E routed experts, I inner width of an expert,
m ratio of a layer, V vocabulary, c = 2 for V4's overlapping compressor (m = 4) and 1 for all others.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Coefficients of one sublayer's stream mixing (checkpoint: `hc_attn_*`, `hc_ffn_*`)."""

    fn: torch.Tensor  # [(2 + hc) * hc, hc * d]
    base: torch.Tensor  # [(2 + hc) * hc]
    scale: torch.Tensor  # [3] of pre, post, comb


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Pooling of m tokens into one entry; `width` is D for main entries, the index head dim for V4's index keys."""

    wkv: torch.Tensor  # [c * width, d]
    wgate: torch.Tensor | None  # [c * width, d]; None if m = 1
    norm: torch.Tensor  # [width]
    ape: torch.Tensor | None = None  # [m, c * width], V4 only


@dataclass(frozen=True, slots=True)
class IndexKeyWeights:
    """V4.1's index key of an entry, computed from its latent."""

    wk: torch.Tensor  # [index head dim, D]
    norm: torch.Tensor  # [index head dim]


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Index query of a layer that selects entries itself; V4 also compresses its own index keys here."""

    wq_b: torch.Tensor  # [index heads * index head dim, q_lora]
    weights_proj: torch.Tensor  # [index heads, d]
    compressor: CompressorWeights | None = None  # V4 only


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One attention sublayer. `compressor` and `index_key` exist where the layer owns global KV."""

    wq_a: torch.Tensor  # [q_lora, d]
    q_norm: torch.Tensor  # [q_lora]
    wq_b: torch.Tensor  # [H * D, q_lora]
    wkv: torch.Tensor  # [D, d]
    kv_norm: torch.Tensor  # [D]
    sink: torch.Tensor  # [H]
    wo_a: torch.Tensor  # [G, o_lora, H * D / G]
    wo_b: torch.Tensor  # [d, G * o_lora]
    compressor: CompressorWeights | None = None
    index_key: IndexKeyWeights | None = None
    indexer: IndexerWeights | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One gated feed-forward block: the shared expert."""

    w13: torch.Tensor  # [2 * I, d]: w1 (gate), then w3 (up)
    w2: torch.Tensor  # [d, I]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Gate, routed experts stacked, shared expert."""

    gate: torch.Tensor  # [E, d]
    bias: torch.Tensor | None  # [E]; None in V4's hash layers
    bias_vl: torch.Tensor | None  # [E], used by image rows; V4.1 only
    token_experts: torch.Tensor | None  # int64 [V, experts per token], V4's hash layers only (`tid2eid`)
    w13: torch.Tensor  # [E, 2 * I, d]: per expert w1, then w3
    w2: torch.Tensor  # [E, d, I]
    shared: ExpertWeights


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """N-gram memory of one layer. The table keeps its published bytes and may be memory-mapped: never copy it."""

    codes: torch.Tensor  # uint8 [rows, head dim]: e4m3 bits
    scales: torch.Tensor  # uint8 [rows, head dim / 32]: e8m0 bits
    wkv: torch.Tensor  # [(hc + 1) * d, columns * head dim]: hc keys, then the value
    q_weight: torch.Tensor  # [hc, d]
    k_weight: torch.Tensor  # [hc, d]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block: a backbone layer or a draft stage."""

    attn_norm: torch.Tensor  # [d]
    ffn_norm: torch.Tensor  # [d]
    hc_attn: MixWeights
    hc_ffn: MixWeights
    attn: AttentionWeights
    moe: MoeWeights
    engram: EngramWeights | None = None


@dataclass(frozen=True, slots=True)
class HeadMixWeights:
    """V4's own collapse before the head (checkpoint: `hc_head_*`)."""

    fn: torch.Tensor  # [hc, hc * d]
    base: torch.Tensor  # [hc]
    scale: torch.Tensor  # [1]


@dataclass(frozen=True, slots=True)
class DsparkWeights:
    """The draft model: embedding and head are the backbone's."""

    main_proj: torch.Tensor  # [d, captured layers * d]
    main_norm: torch.Tensor  # [d]
    stages: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [d], of the last stage
    markov_embed: torch.Tensor  # [V, rank]
    markov_head: torch.Tensor  # [V, rank]
    confidence: torch.Tensor  # [d + rank]


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole text model. Weights of the vision tower are loaded apart (`vision.weights`)."""

    embed: torch.Tensor  # [V, d]
    head: torch.Tensor  # [V, d]
    norm: torch.Tensor  # [d]
    layers: tuple[LayerWeights, ...]
    head_mix: HeadMixWeights | None = None  # V4 only
    dspark: DsparkWeights | None = None
