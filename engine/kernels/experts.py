# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""What both grouped expert products share: planes of activations, which tile a program works on, unpacked weights.

Weights are the rows of the matrix product and activations its columns: few columns are what decoding has, and weights
are unpacked once, in registers. A 32-bit word holds eight weights along K; nibble n of all words makes plane n, whose
product is with elements n, n + 8, n + 16 .. of the activations, so those are laid out in eight planes, too.
"""

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
    values = e4m3_value(tl.load(X + row * K + at, mask=inside, other=0))
    scales = tl.load(S + row * (K // 32) + at // 32, mask=inside, other=127)
    values = values * power(scales.to(tl.int32)) * UNPLANED
    tl.store(OUT + row * K + (at % 8) * (K // 8) + at // 8, values.to(tl.bfloat16), mask=inside)


def planes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [t, 8, K / 8]: 2^60 times the values of e4m3 codes [t, K], element k at [k % 8, k / 8]. Exact."""
    rows, width = codes.shape
    out = torch.empty(rows, 8, width // 8, dtype=torch.bfloat16, device=codes.device)
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
def add_product(total, W, S, X, block, FAR: tl.constexpr, column, exists, start, K: tl.constexpr, PTX: tl.constexpr):
    """Return total [128, columns] plus the product over K indices start .. start + 127.

    `W` and `S` of `reference.formats.tiled`; rows are the 64 of `block` (int64) and the 64 of block + FAR. `X` of
    `planes`, `column` int64 its rows.
    """
    row = tl.arange(0, 128)
    group = tl.arange(0, 4)
    tile = block * (K // 128) + start // 128
    far = row // 64 * (FAR * K // 128)
    word = group[None, :, None] * 4 + group[None, None, :]
    words = tl.load(W + tile * 1024 + (far * 1024 + row % 64 * 16)[:, None, None] + word)
    scales = tl.load(S + tile * 256 + (far * 256 + row % 64 * 4)[:, None] + group[None, :])
    spread = tl.broadcast_to(tl.expand_dims(plane_scale(scales), 2), (128, 4, 4))
    weights = arranged_planes(words, spread, 128, PTX)
    at = X + column[None, :] * K + start // 8 + tl.arange(0, 16)[:, None]
    for n in tl.static_range(8):
        x = tl.load(at + n * (K // 8), mask=exists[None, :], other=0.0)
        total = tl.dot(tl.reshape(weights[n], (128, 16)), x, total)
    return total


def columns_tile(pairs: int, experts: int) -> int:
    """Return the columns per tile: twice the mean number of pairs per expert, so that most experts need one tile."""
    return max(16, min(128, triton.next_power_of_2(triton.cdiv(2 * pairs, experts))))


def max_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return the most tiles that any distribution of pairs needs."""
    return min(pairs, experts) + (pairs - min(pairs, experts)) // tile
