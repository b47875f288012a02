# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Second grouped expert product: FP4 weights times the quantized inner activations, put back into the order of pairs."""

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import all_agree
from engine.kernels.experts import Shape, max_tiles, places_of, planes, product, shape_for, shard_of, tile_of
from engine.kernels.launch import kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before
from engine.kernels.shards import Shards


@triton.jit
def _tile_down(
    X, ORDER, W, WS, OUT, first, last, row, made_at,
    K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    place = first + tl.arange(0, TILE)
    exists = place < last
    pair = tl.load(ORDER + place, mask=exists, other=0).to(tl.int64)
    total = product(W, WS, X, row, tl.minimum(place, last - 1).to(tl.int64), exists, K, ROWS, TILE, PARTS, MASKED, PTX)
    made = tl.trans(total.to(tl.bfloat16))
    tl.store(OUT + pair[:, None] * D + made_at[None, :], made, mask=exists[:, None])


@kernel
def _experts_down(
    X, ORDER, OFFSETS, W, WS, OUT, each,
    K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, NARROW: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, SHARDED: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    expert, first, last = tile_of(OFFSETS, tl.program_id(1), E, EXPERTS, TILE)
    if expert < E:
        words, scales, held = shard_of(W, WS, expert, each, SHARDED)
        column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        row = held.to(tl.int64) * D + column
        if all_agree(last - first, NARROW, PTX):
            _tile_down(X, ORDER, words, scales, OUT, first, last, row, column, K, D, ROWS, NARROW, PARTS, MASKED, PTX)
        elif NARROW < TILE:
            _tile_down(X, ORDER, words, scales, OUT, first, last, row, column, K, D, ROWS, TILE, PARTS, MASKED, PTX)


def shape_of(pairs: int, experts: int) -> Shape:
    """Return how the product of `pairs` pairs is cut."""
    return shape_for(pairs, experts)


def experts_down(
    codes: torch.Tensor,
    scales: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    w2: Shards,
) -> torch.Tensor:
    """Return bfloat16 [t k, d]: what each pair adds to its row; `combine` sums them. Pairs nowhere get zeros.

    `codes`, `scales` of `experts_up`; `order`, `offsets` of `sort_routes`; `w2` [E, d / 64, I / 128, 64, 16] and
    scales of `reference.formats.tiled`, whose shards may lie in several buffers. d and I are multiples of 128.
    """
    experts, width, inner = w2.count, w2.codes[0].shape[1] * 64, codes.shape[1]
    pairs = len(order)
    out = torch.empty(pairs, width, dtype=torch.bfloat16, device=codes.device)
    shape = shape_of(pairs, experts)
    _experts_down[(width // shape.rows, max_tiles(pairs, experts, shape.tile))](
        planes(codes, scales, (out, offsets), pdl=shape.pdl), order, offsets, *places_of(w2), out, w2.each,
        K=inner, D=width, E=experts, EXPERTS=next_power_of_2(experts),
        ROWS=shape.rows, TILE=shape.tile, NARROW=shape.narrow, PARTS=shape.parts,
        MASKED=shape.masked, SHARDED=len(w2.codes) > 1, PTX=chip.speaks_ptx(), PDL=shape.pdl, **shape.options,
    )  # fmt: skip
    return out
