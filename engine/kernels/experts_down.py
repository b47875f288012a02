# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Second grouped expert product: FP4 weights times the quantized inner activations, put back into the order of pairs."""

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.experts import add_product, columns_tile, max_tiles, places_of, planes, shard_of, tile_of
from engine.kernels.shards import Shards


@triton.jit
def _experts_down(
    X, ORDER, OFFSETS, W, WS, OUT, each,
    K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,
    TILE: tl.constexpr, SHARDED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    expert, first, last = tile_of(OFFSETS, tl.program_id(1), E, EXPERTS, TILE)
    if expert < E:
        place = first + tl.arange(0, TILE)
        exists = place < last
        pair = tl.load(ORDER + place, mask=exists, other=0).to(tl.int64)
        column = tl.program_id(0) * 128 + tl.arange(0, 128)
        words, scales, held = shard_of(W, WS, expert, each, SHARDED)
        block = held.to(tl.int64) * (D // 64) + tl.program_id(0) * 2
        total = tl.zeros((128, TILE), tl.float32)
        for start in tl.range(0, K, 128):
            total = add_product(total, words, scales, X, block, 1, place.to(tl.int64), exists, start, K, PTX)
        made = tl.trans(total.to(tl.bfloat16))
        tl.store(OUT + pair[:, None] * D + column[None, :], made, mask=exists[:, None])


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
    out = torch.zeros(pairs, width, dtype=torch.bfloat16, device=codes.device)
    tile = columns_tile(pairs, experts)
    _experts_down[(width // 128, max_tiles(pairs, experts, tile))](
        planes(codes, scales), order, offsets, *places_of(w2), out, w2.each,
        K=inner, D=width, E=experts, EXPERTS=triton.next_power_of_2(experts), TILE=tile,
        SHARDED=len(w2.codes) > 1, PTX=chip.speaks_ptx(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
