# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""What both grouped expert products share: planes of activations, which tile a program works on, unpacked weights.

Weights are the rows of the matrix product and activations its columns: few columns are what decoding has, and weights
are unpacked once, in registers. A 32-bit word holds eight weights along K; nibble n of all words makes plane n, whose
product is with elements n, n + 8, n + 16 .. of the activations, so those are laid out in planes, too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.device import (
    UNPLANED,
    arranged_planes,
    e4m3_value,
    grouped_plane,
    joined_planes,
    plane_scale,
    power,
    settled,
)
from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps
from engine.kernels.shards import Shards


@kernel
def _planes(
    X, S, OUT, CLEARED, OFFSETS, K: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, CLEAR: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    group = part * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    scales = power(tl.load(S + row * (K // 32) + group, mask=group < K // 32, other=127).to(tl.int32)) * UNPLANED
    values = tl.reshape(e4m3_value(tl.load(X + row * K + at, mask=inside, other=0)), (BLOCK // 32, 32))
    values = tl.reshape((values * scales[:, None]).to(tl.bfloat16), (BLOCK // 128, 4, 2, 2, 8))
    tl.store(OUT + row * K + at, tl.reshape(tl.permute(values, (0, 4, 2, 1, 3)), (BLOCK,)), mask=inside)
    if CLEAR:  # noqa: SIM102 - what is a constant is left out, which a compound condition is not
        # Mostly every pair has an expert, whose result comes here.
        if tl.load(OFFSETS + E) < tl.num_programs(0):
            for begin in tl.static_range(0, WIDTH, PARTS * BLOCK):
                at = begin + part * BLOCK + tl.arange(0, BLOCK)
                tl.store(CLEARED + row * WIDTH + at, tl.zeros((BLOCK,), tl.bfloat16), mask=at < WIDTH)


def planes(
    codes: torch.Tensor, scales: torch.Tensor, cleared: tuple[torch.Tensor, torch.Tensor] | None = None, *, pdl: bool
) -> torch.Tensor:
    """Return bfloat16 [t, K / 128, 8, 2, 4, 2]: 2^60 times the values of e4m3 codes [t, K], exactly.

    Element k is at [k / 128, k % 8, k / 16 % 2, k / 32 % 4, k / 8 % 2], as `product` has weights; 128 divides K.
    `cleared` bfloat16 [t, n], with the `offsets` of `sort_routes`, becomes zero if some of t pairs have no expert, which
    saves a launch.
    """
    rows, width = codes.shape
    out = torch.empty(rows, width // 128, 8, 2, 4, 2, dtype=torch.bfloat16, device=codes.device)
    block = min(1024, next_power_of_2(width))
    parts = cdiv(width, block)
    zeros, offsets = cleared or (codes, codes)
    if rows:
        _planes[(rows, parts)](
            codes, scales, out, zeros, offsets, K=width, WIDTH=zeros.shape[1],
            E=len(offsets) - 1 if cleared else 0, CLEAR=cleared is not None, PARTS=parts, BLOCK=block, PDL=pdl, num_warps=4, **options(pdl),
        )  # fmt: skip
    return out


@triton.jit
def tile_of(OFFSETS, tile, E: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Return expert (E if there is none), first and last + 1 sorted pair of a tile of columns; EXPERTS >= E is padded."""
    at = tl.arange(0, EXPERTS)
    begin = tl.load(OFFSETS + at, mask=at < E, other=0)
    end = tl.load(OFFSETS + at + 1, mask=at < E, other=0)
    tiles = tl.cdiv(end - begin, TILE)
    through = tl.cumsum(tiles, axis=0)
    expert = tl.sum(((through <= tile) & (at < E)).to(tl.int32), axis=0)
    before = tl.sum(tl.where(at == expert, through - tiles, 0), axis=0)
    first = tl.sum(tl.where(at == expert, begin, 0), axis=0) + (tile - before) * TILE
    last = tl.sum(tl.where(at == expert, end, 0), axis=0)
    return expert, first, tl.minimum(last, first + TILE)


@triton.jit
def shard_of(W, WS, expert, each, SHARDED: tl.constexpr):
    """Return where words and scales of an expert's shard begin, and its number there; SHARDED: `W` and `WS` are tables."""
    if SHARDED:
        shard = expert // each
        # An allocation is aligned; said, so that tiles are fetched by 16 bytes as without a table.
        words = tl.multiple_of(tl.load(W + shard).to(tl.pointer_type(tl.int32)), 16)
        scales = tl.multiple_of(tl.load(WS + shard).to(tl.pointer_type(tl.uint8)), 16)
        return words, scales, expert - shard * each
    else:
        return W, WS, expert


def places_of(weights: Shards) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `W` and `WS` of `shard_of`: one shard is read without a table."""
    if len(weights.codes) == 1:
        return weights.codes[0], weights.scales[0]
    return weights.addresses[0], weights.addresses[1]


@triton.jit
def _four(a, b, c, d, ROWS: tl.constexpr):
    """Return [ROWS, 64] of four planes [ROWS, 4, 4], one after the other: no value leaves its thread."""
    both = tl.join(
        tl.join(grouped_plane(a, ROWS), grouped_plane(c, ROWS)), tl.join(grouped_plane(b, ROWS), grouped_plane(d, ROWS))
    )
    return tl.reshape(tl.permute(both, (0, 4, 5, 1, 2, 3)), (ROWS, 64))


@triton.jit
def columns_of(at, exists, MASKED: tl.constexpr):
    """Return columns at addresses; those that do not exist are zero if MASKED, or anything, which saves predicates."""
    if MASKED:
        return tl.load(at, mask=exists[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def product(
    W, S, X, row, column, exists,
    K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return float32 [ROWS, TILE]: rows `row` (int64) of a matrix of K columns times rows `column` (int64) of X.

    `W` and `S` of `reference.formats.tiled`, `X` of `planes`; columns that do not exist are anything, but there
    is a row of X to read for them. PARTS (1, 2): in how many products 128 columns are multiplied; sums have the same
    order.
    """
    group = tl.arange(0, 4)
    tile = row // 64 * (K // 128)
    # In two dimensions: in three, Triton 3.6 gives a warp 32 rows of 16 bytes, which asks for every sector twice.
    w = W + (tile * 1024 + row % 64 * 16)[:, None] + tl.arange(0, 16)[None, :]
    s = S + (tile * 256 + row % 64 * 4)[:, None] + group[None, :]
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(0, K, 128):
        scales = tl.load(s + start * 2)
        spread = tl.broadcast_to(tl.expand_dims(plane_scale(scales), 2), (ROWS, 4, 4))
        weights = arranged_planes(tl.reshape(tl.load(w + start * 8), (ROWS, 4, 4)), spread, ROWS, PTX)
        at = X + column[None, :] * K + start + tl.arange(0, 128 // PARTS)[:, None]
        if PARTS == 1:
            total = tl.dot(joined_planes(weights, ROWS), columns_of(at, exists, MASKED), total)
        else:
            left, right = columns_of(at, exists, MASKED), columns_of(at + 64, exists, MASKED)
            total = tl.dot(_four(weights[0], weights[1], weights[2], weights[3], ROWS), left, total)
            total = tl.dot(_four(weights[4], weights[5], weights[6], weights[7], ROWS), right, total)
        total = settled(total, PTX)
    return total


class Shape(NamedTuple):
    """How a grouped product is cut."""

    rows: int
    """Rows of weights a program works on."""
    tile: int
    """Pairs of one expert that are columns of one product."""
    narrow: int
    """Columns where an expert's last tile has no more pairs."""
    warps: int
    stages: int
    parts: int
    """Products that 128 columns are multiplied in: 1 is waited for once, 2 leave more registers."""
    masked: bool
    """Do not read columns that do not exist."""
    pdl: bool

    @property
    def options(self) -> dict[str, int | bool]:
        """Launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages, **options(self.pdl)}


def shape_for(pairs: int, experts: int) -> Shape:
    """Return how `pairs` pairs are cut.

    Up to a mean of 32 pairs an expert tiles are twice as wide, so that most experts need one, and half as wide where that
    is enough; of more pairs all but the last are full, and what is behind them is narrow.
    """
    mean = cdiv(pairs, experts)
    tile = 128 if mean > 64 else max(16, min(64, next_power_of_2(2 * mean)))
    narrow = max(16, tile // 2) if mean <= 32 else tile // 4
    wide = tile == 128
    return Shape(
        rows=128, tile=tile, narrow=narrow, warps=4, stages=4 if tile <= 32 else 3, parts=1 if wide else 2, masked=not wide,
        pdl=overlaps(),
    )  # fmt: skip


def max_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return the most tiles that any distribution of pairs needs."""
    return min(pairs, experts) + (pairs - min(pairs, experts)) // tile
