# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""N-gram look-up: hashes a token's last tokens and gathers the rows of its columns through a table of addresses.

What comes out is quantized already: a quantized linear reads it as it is.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps
from engine.kernels.shards import NgramColumns, Shards


@kernel
def _engram_lookup(
    NGRAMS, MAP, MULTIPLIERS, PRIMES, OFFSETS, ADDRESSES, CODES, SCALES, pad, rows_each, shards,
    LENGTH: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, COUNT: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < COUNT
    last = 1 + column // EACH
    mixed = tl.zeros((COLUMNS,), tl.int64)
    alive = token >= 0
    for i in tl.static_range(LENGTH):
        one = tl.load(NGRAMS + token * LENGTH + i)
        alive = alive & (one >= 0)
        packed = tl.load(MAP + tl.maximum(one, 0))
        packed = tl.where(alive, packed, pad).to(tl.int64)
        mixed = tl.where(i <= last, mixed ^ (packed * tl.load(MULTIPLIERS + i)), mixed)
    row = mixed % tl.load(PRIMES + column, mask=exists, other=1)
    row += tl.load(OFFSETS + column, mask=exists, other=0)
    shard = row // rows_each
    inside = row - shard * rows_each
    # An allocation is aligned; said, so that rows are fetched by 16 bytes.
    table = (tl.load(ADDRESSES + shard, mask=exists, other=0) + inside * WIDTH).to(tl.pointer_type(tl.uint8))
    table = tl.multiple_of(table, [16])
    table_scales = tl.load(ADDRESSES + shards + shard, mask=exists, other=0) + inside * GROUPS
    out = token * COUNT + column
    at = tl.arange(0, WIDTH)
    codes = table[:, None] + at[None, :]
    tl.store(CODES + out[:, None] * WIDTH + at, tl.load(codes, mask=exists[:, None], other=0), mask=exists[:, None])
    group = tl.arange(0, GROUPS)
    scales = (table_scales[:, None] + group[None, :]).to(tl.pointer_type(tl.uint8))
    where = SCALES + out[:, None] * GROUPS + group
    tl.store(where, tl.load(scales, mask=exists[:, None], other=0), mask=exists[:, None])


class Shape(NamedTuple):
    """What a launch chooses."""

    columns: int
    """Of a token, a program."""
    warps: int
    pdl: bool


def shape_of(rows: int, width: int) -> Shape:
    """Return the shape for so many tokens and table rows of a width: few tokens have few programs, many have less to do."""
    return Shape(columns=8 if rows <= 512 else 32, warps=max(1, min(4, width // 64)), pdl=overlaps())


def engram_lookup(
    ngrams: torch.Tensor, token_map: torch.Tensor, columns: NgramColumns, table: Shards
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes uint8 [t, c width] and e8m0 scales uint8 [t, c width / 32] of the c columns of t tokens.

    `ngrams` int64 [t, n]: a token's id, then older ones, negative where there is none (that one and all older ones count
    as padding); `token_map` int64 [V] compressed ids. Column j hashes the newest 2 + j / (c / (n - 1)) tokens. The width
    of table rows is a power of two, at least 32.
    """
    rows, length = ngrams.shape
    count, width = len(columns.primes), table.codes[0].shape[1]
    codes = torch.empty(rows, count * width, dtype=torch.uint8, device=ngrams.device)
    scales = torch.empty(rows, count * width // 32, dtype=torch.uint8, device=ngrams.device)
    if rows:
        shape = shape_of(rows, width)
        _engram_lookup[(rows, cdiv(count, shape.columns))](
            ngrams, token_map, columns.multipliers, columns.primes, columns.offsets, table.addresses, codes, scales,
            columns.pad, table.each, table.addresses.shape[1],
            LENGTH=length, EACH=count // (length - 1), WIDTH=width, GROUPS=width // 32, COUNT=count,
            COLUMNS=shape.columns, PDL=shape.pdl, num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return codes, scales
