# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Grouped-query attention over paged KV: decoding with a row's keys split and merged, chunks in tiles of queries.

All heads of one KV head share each read of a key. How the keys of a token are split follows from their number and from
`splits` alone, so a token's bits depend on neither the batch nor, with `by_token`, the chunk it came in.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import kernel, next_power_of_2

LOG2_E = 1.4426950408889634
DECODE = {"TILE": 64, "num_warps": 2, "num_stages": 3}
CHUNK = {"M": 128, "TILE": 64, "num_warps": 4, "num_stages": 2}
_CHUNK_F32 = {"M": 32, "TILE": 32, "num_warps": 4, "num_stages": 2}


@triton.jit
def _row_of(STARTS, x, count, Q: tl.constexpr):
    """Return the last row r with STARTS[r] // Q + (r if Q > 1) <= x: who owns token x, or tile x of Q tokens."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(STARTS + middle)
        if Q > 1:
            first = first // Q + middle
        below = first <= x
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _read(PAGES, TABLE, key, valid, page_stride, width, D: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Return the pointers [keys, D] of keys at positions `key` [keys]."""
    if MASKED:
        page = tl.load(TABLE + key // PAGE, mask=valid, other=0).to(tl.int64)
    else:
        page = tl.load(TABLE + key // PAGE).to(tl.int64)
    return PAGES + (page * page_stride + (key % PAGE) * D)[:, None] + width[None, :]


@triton.jit
def _attend(q, k, v, valid, most, total, o, SCALE: tl.constexpr, MASKED: tl.constexpr):
    """Take one tile of keys into the running softmax; returns most, total, outputs."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
    if MASKED:
        scores = tl.where(valid, scores, float("-inf"))
    new = tl.maximum(most, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new[:, None])
    old = tl.exp2(most - new)
    total = total * old + tl.sum(weights, axis=1)
    o = tl.dot(weights.to(v.dtype), v, o * old[:, None], input_precision="ieee")
    return new, total, o


@kernel(do_not_specialize=["count"])
def _decode(
    Q, PAGES, TABLE, STARTS, SEQ, OUT, PARTS, SIZES, count, table_stride, page_stride, value_stride, head_stride,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, SCALE: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    split = tl.program_id(2)
    if BY_TOKEN:
        row = _row_of(STARTS, index, count, 1)
        token = index
        alive = token < tl.load(STARTS + count)
        seen = tl.load(SEQ + row) + token - tl.load(STARTS + row) + 1
    else:
        row = index
        token = tl.load(STARTS + row)
        alive = tl.load(STARTS + row + 1) - token == 1
        seen = tl.load(SEQ + row) + 1
    tiles = tl.where(alive, tl.cdiv(seen, TILE), 0)
    first = split * tiles // SPLITS
    end = (split + 1) * tiles // SPLITS
    if first < end:
        group = tl.arange(0, GROUP)
        width = tl.arange(0, D)
        inside = tl.arange(0, TILE)
        head = kv_head * G + group
        there = (group < G)[:, None]
        at = token.to(tl.int64) * (K * G * D) + head[:, None] * D + width[None, :]
        q = tl.load(Q + at, mask=there, other=0.0)
        most = tl.full((GROUP,), -1e30, tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        o = tl.zeros((GROUP, D), tl.float32)
        keys = PAGES + kv_head * head_stride
        table = TABLE + row.to(tl.int64) * table_stride
        for tile in tl.range(first, end):
            key = tile * TILE + inside
            valid = key < seen
            place = _read(keys, table, key, valid, page_stride, width, D, PAGE, True)
            k = tl.load(place, mask=valid[:, None], other=0.0)
            v = tl.load(place + value_stride, mask=valid[:, None], other=0.0)
            most, total, o = _attend(q, k, v, valid[None, :], most, total, o, SCALE, True)
        if SPLITS == 1:
            tl.store(OUT + at, (o / total[:, None]).to(OUT.dtype.element_ty), mask=there)
        else:
            part = (index.to(tl.int64) * SPLITS + split) * (K * G) + head
            tl.store(SIZES + part * 2, most, mask=group < G)
            tl.store(SIZES + part * 2 + 1, total, mask=group < G)
            tl.store(PARTS + part[:, None] * D + width[None, :], o, mask=there)


@kernel(do_not_specialize=["count"])
def _merge(
    PARTS, SIZES, STARTS, SEQ, OUT, count, H: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    index = tl.program_id(1)
    if BY_TOKEN:
        row = _row_of(STARTS, index, count, 1)
        token = index
        alive = token < tl.load(STARTS + count)
        seen = tl.load(SEQ + row) + token - tl.load(STARTS + row) + 1
    else:
        token = tl.load(STARTS + index)
        alive = tl.load(STARTS + index + 1) - token == 1
        seen = tl.load(SEQ + index) + 1
    if alive:
        tiles = tl.cdiv(seen, TILE)
        split = tl.arange(0, SPLITS)
        # Parts without a tile were not written.
        made = split * tiles // SPLITS < (split + 1) * tiles // SPLITS
        part = (index.to(tl.int64) * SPLITS + split) * H + head
        most = tl.load(SIZES + part * 2, mask=made, other=-1e30)
        share = tl.where(made, tl.exp2(most - tl.max(most, axis=0)), 0.0)
        total = tl.sum(share * tl.load(SIZES + part * 2 + 1, mask=made, other=0.0), axis=0)
        width = tl.arange(0, D)
        o = tl.load(PARTS + part[:, None] * D + width[None, :], mask=made[:, None], other=0.0)
        o = tl.sum(o * share[:, None], axis=0) / total
        tl.store(OUT + token.to(tl.int64) * (H * D) + head * D + width, o.to(OUT.dtype.element_ty))


@kernel(do_not_specialize=["count"])
def _chunks(
    Q, PAGES, TABLE, STARTS, SEQ, OUT, count, table_stride, page_stride, value_stride, head_stride,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = M // GROUP
    kv_head = tl.program_id(0)
    # Later tiles of a chunk have more keys: they come first.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    row = _row_of(STARTS, index, count, QUERIES)
    begin = tl.load(STARTS + row)
    queries = tl.load(STARTS + row + 1) - begin
    base = (index - begin // QUERIES - row) * QUERIES
    if (queries > 1) & (base < queries):
        start = tl.load(SEQ + row)
        inside = tl.arange(0, TILE)
        width = tl.arange(0, D)
        query = base + tl.arange(0, M) // GROUP
        group = tl.arange(0, M) % GROUP
        there = ((query < queries) & (group < G))[:, None]
        at = (begin + query).to(tl.int64) * (K * G * D) + (kv_head * G + group) * D
        at = at[:, None] + width[None, :]
        q = tl.load(Q + at, mask=there, other=0.0)
        most = tl.full((M,), -1e30, tl.float32)
        total = tl.zeros((M,), tl.float32)
        o = tl.zeros((M, D), tl.float32)
        keys = PAGES + kv_head * head_stride
        table = TABLE + row.to(tl.int64) * table_stride
        # Every query of the tile sees the keys up to its first one's.
        whole = (start + base + 1) // TILE
        for tile in tl.range(0, whole):
            place = _read(keys, table, tile * TILE + inside, 0, page_stride, width, D, PAGE, False)
            most, total, o = _attend(q, tl.load(place), tl.load(place + value_stride), 0, most, total, o, SCALE, False)
        end = start + tl.minimum(base + QUERIES, queries)
        for tile in tl.range(whole, tl.cdiv(end, TILE)):
            key = tile * TILE + inside
            valid = key < end
            place = _read(keys, table, key, valid, page_stride, width, D, PAGE, True)
            k = tl.load(place, mask=valid[:, None], other=0.0)
            v = tl.load(place + value_stride, mask=valid[:, None], other=0.0)
            visible = key[None, :] <= (start + query)[:, None]
            most, total, o = _attend(q, k, v, visible & valid[None, :], most, total, o, SCALE, True)
        tl.store(OUT + at, (o / total[:, None]).to(OUT.dtype.element_ty), mask=there)


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    q_start: torch.Tensor,
    seq_start: torch.Tensor,
    max_q: int,
    splits: int,
    by_token: bool,
) -> torch.Tensor:
    """Return [t, h, d]: each query of a row attends to the row's keys up to its own position.

    `query` [t, h, d] contiguous; `pages` [num_pages, 2, k, p, d] one layer of KV memory whose last two axes are dense,
    which has the step's own keys already; all bfloat16 or all float32; d a power of two from 16. `page_table` int32
    [b, w], last axis dense; `q_start` int32 [b + 1], `seq_start` int32 [b]; no row has more than `max_q` tokens. A row
    may have none; tokens from `q_start[b]` on are padding, and their output is not defined. `splits`, a power of two:
    parts of a token's keys that are computed side by side. With `by_token` chunks run token by token, as decoding does.
    Softmax weights are rounded to the type of the values; sums are float32.
    """
    tokens, heads, width = query.shape
    kv_heads, size = pages.shape[2:4]
    rows, group = len(seq_start), heads // kv_heads
    assert pages.stride()[3:] == (width, 1)
    assert page_table.stride(1) == 1
    out = torch.empty_like(query)
    if not tokens:
        return out
    shape = {"D": width, "PAGE": size, "SCALE": width**-0.5 * LOG2_E, "K": kv_heads, "G": group}
    strides = (page_table.stride(0), pages.stride(0), pages.stride(1), pages.stride(2))
    count = tokens if by_token else rows
    parts = sizes = out
    if splits > 1:
        parts = torch.empty(count, splits, heads, width, dtype=torch.float32, device=query.device)
        sizes = torch.empty(count, splits, heads, 2, dtype=torch.float32, device=query.device)
    _decode[(kv_heads, count, splits)](
        query, pages, page_table, q_start, seq_start, out, parts, sizes, rows, *strides, **shape, **DECODE,
        GROUP=max(16, next_power_of_2(group)), SPLITS=splits, BY_TOKEN=by_token,
    )  # fmt: skip
    if splits > 1:
        _merge[(heads, count)](
            parts, sizes, q_start, seq_start, out, rows, H=heads, D=width, TILE=DECODE["TILE"], SPLITS=splits,
            BY_TOKEN=by_token, num_warps=4,
        )  # fmt: skip
    if max_q > 1 and not by_token:
        tiles = CHUNK if query.dtype is torch.bfloat16 else _CHUNK_F32
        padded = next_power_of_2(group)
        _chunks[(kv_heads, tokens // (tiles["M"] // padded) + rows)](
            query, pages, page_table, q_start, seq_start, out, rows, *strides, **shape, **tiles, GROUP=padded,
        )  # fmt: skip
    return out
