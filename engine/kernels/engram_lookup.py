# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""N-gram look-up: hashes a token's last tokens and gathers the rows of its columns through a table of addresses.

What comes out is quantized already: a quantized linear reads it as it is.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.shards import NgramColumns, Shards


@triton.jit
def _engram_lookup(
    NGRAMS, MAP, MULTIPLIERS, PRIMES, OFFSETS, ADDRESSES, CODES, SCALES, pad, rows_each, shards,
    LENGTH: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    last = 1 + column // EACH
    mixed = tl.full((), 0, tl.int64)
    alive = token >= 0
    for i in tl.static_range(LENGTH):
        one = tl.load(NGRAMS + token * LENGTH + i)
        alive = alive & (one >= 0)
        packed = tl.load(MAP + tl.maximum(one, 0))
        packed = tl.where(alive, packed, pad).to(tl.int64)
        mixed = tl.where(i <= last, mixed ^ (packed * tl.load(MULTIPLIERS + i)), mixed)
    row = mixed % tl.load(PRIMES + column) + tl.load(OFFSETS + column)
    shard = row // rows_each
    inside = row - shard * rows_each
    table = tl.load(ADDRESSES + shard).to(tl.pointer_type(tl.uint8))
    table_scales = tl.load(ADDRESSES + shards + shard).to(tl.pointer_type(tl.uint8))
    out = token * tl.num_programs(1) + column
    at = tl.arange(0, WIDTH)
    tl.store(CODES + out * WIDTH + at, tl.load(table + inside * WIDTH + at))
    group = tl.arange(0, GROUPS)
    tl.store(SCALES + out * GROUPS + group, tl.load(table_scales + inside * GROUPS + group))


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
        _engram_lookup[(rows, count)](
            ngrams, token_map, columns.multipliers, columns.primes, columns.offsets, table.addresses, codes, scales,
            columns.pad, table.each, table.addresses.shape[1],
            LENGTH=length, EACH=count // (length - 1), WIDTH=width, GROUPS=width // 32, num_warps=1,
        )  # fmt: skip
    return codes, scales
