"""Weights of V4.1 as kernels read them: published bits, fused and arranged, on one device. Plain tensors, no arithmetic.

Shape legend: d hidden, hc streams, H heads, D head dim, G output groups, E routed experts, I inner width of an expert
(padded to whole tiles), V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch

from engine.kernels.shards import NgramColumns, Shards


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight in e4m3 with a power of two per block of 32 x 32; G > 1 if it is block-diagonal."""

    codes: torch.Tensor  # uint8 [G, out, in]
    scales: torch.Tensor  # uint8 [G, ceil(out / 32), in / 32]


@dataclass(frozen=True, slots=True)
class Mix:
    """Coefficients of one sublayer's stream mixing."""

    fn: torch.Tensor  # bfloat16 [3, 2 hc + hc^2, hc d]: three parts whose sum is the float32 weight
    scale: torch.Tensor  # float32 [3]
    base: torch.Tensor  # float32 [2 hc + hc^2]


@dataclass(frozen=True, slots=True)
class Pooling:
    """What an owner makes entries and index keys with."""

    weight: torch.Tensor  # bfloat16 [D, d], or [2 D, d] with the gates behind the values
    norm: torch.Tensor  # float32 [D]
    wk: torch.Tensor  # bfloat16 [index head dim, D]
    key_norm: torch.Tensor  # float32 [index head dim]


@dataclass(frozen=True, slots=True)
class Asking:
    """What a layer that selects entries asks with."""

    queries: Dense  # from the query latent
    weights: torch.Tensor  # bfloat16 [index heads, d], with the scores' scale in them


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """One attention sublayer."""

    wqkv: Dense  # [1, q_lora + D, d]
    q_norm: torch.Tensor  # float32 [q_lora]
    wq_b: Dense  # [1, H D, q_lora]
    kv_norm: torch.Tensor  # float32 [D]
    sink: torch.Tensor  # float32 [H]
    wo_a: Dense  # [G, o_lora, H D / G]
    wo_b: Dense  # [1, d, G o_lora]
    pooling: Pooling | None = None
    asking: Asking | None = None


@dataclass(frozen=True, slots=True)
class MoeParts:
    """Gate, routed experts in tiles (`engine.kernels.reference.formats.tiled`), shared expert."""

    gate: torch.Tensor  # bfloat16 [E, d]
    bias: torch.Tensor  # float32 [2, E] of text rows and of image rows
    w13: Shards
    w2: Shards
    shared_w13: Dense
    shared_w2: Dense


@dataclass(frozen=True, slots=True)
class EngramParts:
    """N-gram memory of one layer."""

    table: Shards
    columns: NgramColumns
    wkv: Dense  # [1, (hc + 1) d, columns * head dim]
    weight: torch.Tensor  # float32 [hc, d]: both norm weights, multiplied


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One backbone layer or draft stage."""

    attn_norm: torch.Tensor  # float32 [d]
    ffn_norm: torch.Tensor  # float32 [d]
    mix_attn: Mix
    mix_ffn: Mix
    attn: AttentionParts
    moe: MoeParts
    engram: EngramParts | None = None


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The draft model; embedding and head are the backbone's."""

    main_proj: Dense  # [1, d, captured layers * d]
    main_norm: torch.Tensor  # float32 [d]
    stages: tuple[LayerParts, ...]
    norm: torch.Tensor  # float32 [d]
    markov_embed: torch.Tensor  # bfloat16 [V, rank]
    markov_head: torch.Tensor  # bfloat16 [V, rank]
    confidence: torch.Tensor  # float32 [d + rank]


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The whole text model."""

    embed: torch.Tensor  # bfloat16 [V, d]
    head: torch.Tensor  # bfloat16 [V, d]
    norm: torch.Tensor  # float32 [d]
    token_map: torch.Tensor | None  # int64 [V] compressed ids, for models with n-gram tables
    layers: tuple[LayerParts, ...]
    draft: DraftParts | None = None


def tensors_of(parts: object) -> Iterator[torch.Tensor]:
    """Yield every tensor below some parts."""
    if isinstance(parts, torch.Tensor):
        yield parts
    elif isinstance(parts, tuple):
        for one in parts:
            yield from tensors_of(one)
    elif is_dataclass(parts) and not isinstance(parts, type):
        for field in fields(parts):
            yield from tensors_of(getattr(parts, field.name))


def memory_bytes(parts: ModelParts) -> dict[str, int]:
    """Return the bytes of weights by what they are for, tables wherever they lie."""

    def held(*some: object) -> int:
        return sum(tensor.nbytes for one in some for tensor in tensors_of(one))

    stages = parts.draft.stages if parts.draft else ()
    layers = (*parts.layers, *stages)
    experts = sum(held(p.moe.w13, p.moe.w2) for p in layers)
    tables = sum(held(p.engram.table.codes, p.engram.table.scales) for p in layers if p.engram is not None)
    ends = held(parts.embed, parts.head)
    return {"experts": experts, "tables": tables, "ends": ends, "rest": held(parts) - experts - tables - ends}


def bits_of(weight: Dense) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales, in the order in which `dense_linear` takes them."""
    return weight.codes, weight.scales
