# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""First grouped expert product: FP4 weights times FP8 rows, clamped SwiGLU times the routing weight, quantized again."""

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import all_agree, q8_code
from engine.kernels.experts import Shape, max_tiles, places_of, planes, product, shape_for, shard_of, tile_of
from engine.kernels.launch import kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before
from engine.kernels.shards import Shards


@triton.jit
def _tile_up(
    X, ORDER, W, WS, ROUTE, H, HS, limit, first, last, row,
    K: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr,
    HALF: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    place = first + tl.arange(0, TILE)
    exists = place < last
    pair = tl.load(ORDER + place, mask=exists, other=0)
    token = (pair // TOP_K).to(tl.int64)
    inner = tl.program_id(0) * HALF
    total = product(W, WS, X, row, token, exists, K, 2 * HALF, TILE, PARTS, MASKED, PTX)
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, TILE)), (1, 2, 0)))
    gate = tl.minimum(gate, limit)
    up = tl.clamp(up, -limit, limit)
    weight = tl.load(ROUTE + pair, mask=exists, other=0.0)
    made = (gate * tl.sigmoid(gate) * up * weight[None, :]).to(tl.bfloat16).to(tl.float32)
    codes, made_scales = q8_code(tl.reshape(tl.trans(made), (TILE, HALF // 32, 32)))
    out = H + place[:, None].to(tl.int64) * INNER + inner + tl.arange(0, HALF)
    tl.store(out, tl.reshape(codes, (TILE, HALF)), mask=exists[:, None])
    out = HS + place[:, None].to(tl.int64) * (INNER // 32) + inner // 32 + tl.arange(0, HALF // 32)
    tl.store(out, made_scales.to(tl.uint8), mask=exists[:, None])


@kernel
def _experts_up(
    X, ORDER, OFFSETS, W, WS, ROUTE, H, HS, limit, each,
    K: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,
    HALF: tl.constexpr, TILE: tl.constexpr, NARROW: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, SHARDED: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    expert, first, last = tile_of(OFFSETS, tl.program_id(1), E, EXPERTS, TILE)
    if expert < E:
        words, scales, held = shard_of(W, WS, expert, each, SHARDED)
        at = tl.arange(0, 2 * HALF)
        # Gates, then what they gate: the same columns of the result are in one program.
        row = held.to(tl.int64) * (2 * INNER) + tl.program_id(0) * HALF + at // HALF * INNER + at % HALF
        if all_agree(last - first, NARROW, PTX):
            _tile_up(X, ORDER, words, scales, ROUTE, H, HS, limit, first, last, row,
                     K, INNER, TOP_K, HALF, NARROW, PARTS, MASKED, PTX)  # fmt: skip
        elif NARROW < TILE:
            _tile_up(X, ORDER, words, scales, ROUTE, H, HS, limit, first, last, row,
                     K, INNER, TOP_K, HALF, TILE, PARTS, MASKED, PTX)  # fmt: skip


def shape_of(pairs: int, experts: int) -> Shape:
    """Return how the product of `pairs` pairs is cut."""
    return shape_for(pairs, experts)


def experts_up(
    codes: torch.Tensor,
    scales: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    w13: Shards,
    route_weights: torch.Tensor,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes uint8 [t k, I] and e8m0 scales [t k, I / 32] of sorted pairs: what `experts_down` reads.

    `codes` uint8 [t, d], `scales` uint8 [t, d / 32]: rows as a quantized linear reads them; `order` [t k], `offsets`
    [E + 1] of `sort_routes`; `w13` [E, 2 I / 64, d / 128, 64, 16] and scales of `reference.formats.tiled`, gates first, whose
    shards may lie in several buffers; `route_weights` float32 [t, k]. d is a multiple of 128, I of 64. Places that no expert owns are
    not written. Scales of weights are within 2^-65 and 2^61, as are those of rows.
    """
    experts, inner, width = w13.count, w13.codes[0].shape[1] * 32, codes.shape[1]
    pairs = len(order)
    made = torch.empty(pairs, inner, dtype=torch.uint8, device=codes.device)
    made_scales = torch.empty(pairs, inner // 32, dtype=torch.uint8, device=codes.device)
    shape = shape_of(pairs, experts)
    half = shape.rows // 2
    _experts_up[(inner // half, max_tiles(pairs, experts, shape.tile))](
        planes(codes, scales, pdl=shape.pdl), order, offsets, *places_of(w13), route_weights, made, made_scales,
        limit, w13.each,
        K=width, INNER=inner, TOP_K=route_weights.shape[1], E=experts, EXPERTS=next_power_of_2(experts),
        HALF=half, TILE=shape.tile, NARROW=shape.narrow, PARTS=shape.parts,
        MASKED=shape.masked, SHARDED=len(w13.codes) > 1, PTX=chip.speaks_ptx(), PDL=shape.pdl, **shape.options,
    )  # fmt: skip
    return made, made_scales
