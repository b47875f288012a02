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

from engine.kernels.device import UNPLANED, arranged_planes, e4m3_value, plane_scale, power
from engine.kernels.shards import Shards


@triton.jit
def _planes(X, S, OUT, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < K
    source = at // 128 * 128 + at % 16 * 8 + at % 128 // 16
    values = e4m3_value(tl.load(X + row * K + source, mask=inside, other=0))
    scales = tl.load(S + row * (K // 32) + source // 32, mask=inside, other=127)
    values = values * power(scales.to(tl.int32)) * UNPLANED
    tl.store(OUT + row * K + at, values.to(tl.bfloat16), mask=inside)


def planes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [t, K / 128, 8, 16]: 2^60 times the values of e4m3 codes [t, K], element k at
    [k / 128, k % 8, k % 128 / 8]. Exact; K is a multiple of 128.
    """
    rows, width = codes.shape
    out = torch.empty(rows, width // 128, 8, 16, dtype=torch.bfloat16, device=codes.device)
    _planes[(rows,)](codes, scales, out, K=width, BLOCK=triton.next_power_of_2(width), num_warps=8)
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
    return tl.reshape(tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 3, 4, 1, 2)), (ROWS, 64))


@triton.jit
def _eight(p, ROWS: tl.constexpr):
    """Return [ROWS, 128] of eight planes, as `_four`."""
    even = tl.join(tl.join(p[0], p[4]), tl.join(p[2], p[6]))
    odd = tl.join(tl.join(p[1], p[5]), tl.join(p[3], p[7]))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 3, 4, 5, 1, 2)), (ROWS, 128))


@triton.jit
def product(
    W, S, X, row, column, exists,
    K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, UNROLL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Return float32 [ROWS, TILE]: rows `row` (int64) of a matrix of K columns times rows `column` (int64) of X.

    `W` and `S` of `reference.formats.tiled`, `X` of `planes`; columns that do not exist are zero. PARTS (1, 2, 8): in
    how many products 128 columns are multiplied; sums have the same order.
    """
    group = tl.arange(0, 4)
    word = group[None, :, None] * 4 + group[None, None, :]
    tile = row // 64 * (K // 128)
    w = W + (tile * 1024 + row % 64 * 16)[:, None, None] + word
    s = S + (tile * 256 + row % 64 * 4)[:, None] + group[None, :]
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(0, K, 128, loop_unroll_factor=UNROLL):
        scales = tl.load(s + start * 2)
        spread = tl.broadcast_to(tl.expand_dims(plane_scale(scales), 2), (ROWS, 4, 4))
        weights = arranged_planes(tl.load(w + start * 8), spread, ROWS, PTX)
        at = X + column[None, :] * K + start + tl.arange(0, 128 // PARTS)[:, None]
        if PARTS == 1:
            total = tl.dot(_eight(weights, ROWS), tl.load(at, mask=exists[None, :], other=0.0), total)
        elif PARTS == 2:
            left = tl.load(at, mask=exists[None, :], other=0.0)
            right = tl.load(at + 64, mask=exists[None, :], other=0.0)
            total = tl.dot(_four(weights[0], weights[1], weights[2], weights[3], ROWS), left, total)
            total = tl.dot(_four(weights[4], weights[5], weights[6], weights[7], ROWS), right, total)
        else:
            for n in tl.static_range(8):
                x = tl.load(at + n * 16, mask=exists[None, :], other=0.0)
                total = tl.dot(tl.reshape(weights[n], (ROWS, 16)), x, total)
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
    """Products that 128 columns are multiplied in: 1 is not waited for, 2 leave more registers, 8 are planes."""
    unroll: int
    """Steps of 128 columns in one pass of the loop."""
    registers: int | None
    """The most a thread may have."""


def shape_for(pairs: int, experts: int, *, high: bool) -> Shape:
    """Return how `pairs` pairs are cut; `high`: whether 256 rows of weights may be one program's.

    Tiles are twice the mean number of pairs per expert wide, so that most experts need one. Where many pairs meet, rows
    of activations are what moves most: twice as many rows of weights read them half as often.
    """
    tile = max(16, min(128, triton.next_power_of_2(triton.cdiv(2 * pairs, experts))))
    if tile >= 64 and high:
        return Shape(rows=256, tile=tile, narrow=tile, warps=8, stages=3, parts=1, unroll=1, registers=None)
    return Shape(rows=128, tile=tile, narrow=tile, warps=4, stages=3, parts=1, unroll=1, registers=None)


def max_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return the most tiles that any distribution of pairs needs."""
    return min(pairs, experts) + (pairs - min(pairs, experts)) // tile
