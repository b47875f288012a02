# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Mega attention of decoding and verification: window and selected entries in one softmax with sinks, from packed rows.

One program has all heads of one row and a part of its keys; parts are merged by a second kernel. A key is unpacked once,
into eight planes (elements n, n + 8, ..), and is value too. The output is turned back by the row's position.

Where products are summed in tensor memory (128 lanes of 512 columns), eight outputs [heads, words] and the scores would
need 576 columns: there keys and words are the lanes and heads the columns, and outputs are of two planes each (UPRIGHT).
"""

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, e4m3_value, eight, fp4_planes, power

_TILE = 64
"""Keys at a time."""


@triton.jit
def _whole(p, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return [ROWS, WIDTH] of eight planes."""
    low = tl.join(tl.join(p[0], p[4]), tl.join(p[2], p[6]))
    high = tl.join(tl.join(p[1], p[5]), tl.join(p[3], p[7]))
    return tl.reshape(tl.join(low, high), (ROWS, WIDTH))


@triton.jit
def _byte(words, n: tl.constexpr, scales):
    """Return bfloat16 2^-60 * scale * byte n of int64 words as e4m3."""
    code = ((words >> (8 * n)) & 0xFF).to(tl.uint8)
    return (e4m3_value(code) * scales).to(tl.bfloat16)


@triton.jit
def _attend(
    queries, keys, valid, most, total, o, SCALE: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
    UPRIGHT: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys, eight planes [TILE, WORDS], into the running softmax; returns most, total, outputs.

    Outputs are the eight planes [H, WORDS] or, UPRIGHT, four [2 WORDS, H] whose rows are those of two planes in turns.
    """
    scores = tl.zeros((H, TILE), tl.float32)
    for n in tl.static_range(8):
        scores = tl.dot(queries[n], tl.trans(keys[n]), scores)
    scores = tl.where(valid[None, :], scores * (SCALE * UNPLANED), float("-inf"))
    new = tl.maximum(most, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new[:, None])
    old = tl.exp2(most - new)
    total = total * old + tl.sum(weights, axis=1)
    weights = weights.to(tl.bfloat16)
    if UPRIGHT:
        weights = tl.trans(weights)
        old = old[None, :]
        return new, total, (
            tl.dot(_pair(keys[0], keys[1]), weights, o[0] * old), tl.dot(_pair(keys[2], keys[3]), weights, o[1] * old),
            tl.dot(_pair(keys[4], keys[5]), weights, o[2] * old), tl.dot(_pair(keys[6], keys[7]), weights, o[3] * old),
        )  # fmt: skip
    else:
        old = old[:, None]
        return new, total, (
            tl.dot(weights, keys[0], o[0] * old), tl.dot(weights, keys[1], o[1] * old),
            tl.dot(weights, keys[2], o[2] * old), tl.dot(weights, keys[3], o[3] * old),
            tl.dot(weights, keys[4], o[4] * old), tl.dot(weights, keys[5], o[5] * old),
            tl.dot(weights, keys[6], o[6] * old), tl.dot(weights, keys[7], o[7] * old),
        )  # fmt: skip


@triton.jit
def _pair(a, b):
    """Return [2 WORDS, TILE] of two planes [TILE, WORDS]."""
    return tl.trans(tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1])))


@triton.jit
def _lying(o, H: tl.constexpr, WORDS: tl.constexpr):
    """Return the eight planes [H, WORDS] of four outputs of `_attend_upright`."""
    p0, p1 = tl.split(tl.reshape(tl.trans(o[0]), (H, WORDS, 2)))
    p2, p3 = tl.split(tl.reshape(tl.trans(o[1]), (H, WORDS, 2)))
    p4, p5 = tl.split(tl.reshape(tl.trans(o[2]), (H, WORDS, 2)))
    p6, p7 = tl.split(tl.reshape(tl.trans(o[3]), (H, WORDS, 2)))
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def _finished(o, total, COS, SIN, row, D: tl.constexpr, ROPE: tl.constexpr):
    """Return eight planes of the output, divided by the softmax's total and turned back, in bfloat16."""
    inverse = (1.0 / total * UNPLANED)[:, None]
    pair = 4 * tl.arange(0, D // 8) - (D - ROPE) // 2
    turns = pair >= 0
    at = row * (ROPE // 2) + pair
    a0, a1 = _back(o[0] * inverse, o[1] * inverse, COS, SIN, at, turns)
    a2, a3 = _back(o[2] * inverse, o[3] * inverse, COS, SIN, at + 1, turns)
    a4, a5 = _back(o[4] * inverse, o[5] * inverse, COS, SIN, at + 2, turns)
    a6, a7 = _back(o[6] * inverse, o[7] * inverse, COS, SIN, at + 3, turns)
    return a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def _back(real, imaginary, COS, SIN, at, turns):
    cos = tl.load(COS + at, mask=turns, other=1.0)[None, :]
    sin = tl.load(SIN + at, mask=turns, other=0.0)[None, :]
    return (real * cos + imaginary * sin).to(tl.bfloat16), (imaginary * cos - real * sin).to(tl.bfloat16)


@triton.jit
def _window_keys(slot, valid, D: tl.constexpr, TILE: tl.constexpr):
    """Return eight planes [TILE, D / 8] of window rows at int64 pointers [TILE]."""
    codes = tl.load(slot[:, None] + tl.arange(0, D // 8)[None, :], mask=valid[:, None], other=0)
    at = slot.to(tl.pointer_type(tl.uint8))[:, None] + D + tl.arange(0, D // 32)[None, :]
    wide = power(tl.load(at, mask=valid[:, None], other=127).to(tl.int32) - 60)
    wide = tl.reshape(tl.broadcast_to(tl.expand_dims(wide, 2), (TILE, D // 32, 4)), (TILE, D // 8))
    return (
        _byte(codes, 0, wide), _byte(codes, 1, wide), _byte(codes, 2, wide), _byte(codes, 3, wide),
        _byte(codes, 4, wide), _byte(codes, 5, wide), _byte(codes, 6, wide), _byte(codes, 7, wide),
    )  # fmt: skip


@triton.jit
def _entry_keys(entry, valid, D: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr):
    """Return eight planes [TILE, D / 8] of entries at int32 pointers [TILE]."""
    words = tl.load(entry[:, None] + tl.arange(0, D // 8)[None, :], mask=valid[:, None], other=0)
    at = entry.to(tl.pointer_type(tl.uint8))[:, None] + D // 2 + tl.arange(0, D // 16)[None, :]
    scales = tl.load(at, mask=valid[:, None], other=0)
    lifted = (e4m3_value(scales) * 7.378697629483821e19).to(tl.bfloat16)  # 2^66, as `plane_scale` has it
    lifted = tl.reshape(tl.broadcast_to(tl.expand_dims(lifted, 2), (TILE, D // 16, 2)), (TILE, D // 8))
    return fp4_planes(words, lifted, PTX)


@triton.jit
def _sparse_attention(
    Q, RING, RECORD, POSITIONS, FLOORS, ENTRIES, PAGES, OWNER, SELECTION, SINK, COS, SIN, OUT, PARTS, SIZES,
    capacity, record_stride, entry_stride, page_stride, per_page,
    H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr, TOP: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr, PTX: tl.constexpr, UPRIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    WORDS: tl.constexpr = D // 8
    head = tl.arange(0, H)
    word = tl.arange(0, WORDS)
    inside = tl.arange(0, TILE)
    whole = head[:, None, None] * D + word[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    queries = eight(tl.load(Q + row * (H * D) + whole), H, WORDS)
    if UPRIGHT:
        zero = tl.zeros((2 * WORDS, H), tl.float32)
        o = (zero, zero, zero, zero)
    else:
        zero = tl.zeros((H, WORDS), tl.float32)
        o = (zero, zero, zero, zero, zero, zero, zero, zero)
    most = tl.full((H,), -1e30, tl.float32)
    total = tl.zeros((H,), tl.float32)
    ALL: tl.constexpr = WINDOW // TILE + TOP // TILE
    begin = split * ALL // SPLITS
    end = (split + 1) * ALL // SPLITS
    position = tl.load(POSITIONS + row)
    floor = tl.maximum(tl.load(FLOORS + row), 0)
    ring = RING + tl.load(RECORD + row) * record_stride
    for tile in tl.range(begin, tl.minimum(end, WINDOW // TILE)):
        seen = position - (WINDOW - 1) + tile * TILE + inside
        valid = seen >= floor
        slot = ring + tl.where(valid, seen % capacity, 0) * (D // 8 + D // 256)
        keys = _window_keys(slot, valid, D, TILE)
        most, total, o = _attend(queries, keys, valid, most, total, o, SCALE, H, TILE, UPRIGHT)
    pages = PAGES + tl.load(OWNER + row) * page_stride
    for tile in tl.range(tl.maximum(begin - WINDOW // TILE, 0), end - WINDOW // TILE):
        chosen = tl.load(SELECTION + row * TOP + tile * TILE + inside)
        valid = chosen >= 0
        chosen = tl.maximum(chosen, 0)
        page = tl.load(pages + chosen // per_page).to(tl.int64)
        entry = ENTRIES + page * entry_stride + (chosen % per_page) * (D // 8 + D // 64)
        keys = _entry_keys(entry, valid, D, TILE, PTX)
        most, total, o = _attend(queries, keys, valid, most, total, o, SCALE, H, TILE, UPRIGHT)
    if UPRIGHT:
        o = _lying(o, H, WORDS)
    if SPLITS == 1:
        total += tl.exp2(tl.load(SINK + head) * 1.4426950408889634 - most)
        made = _finished(o, total, COS, SIN, row, D, ROPE)
        out = OUT + row * (H * D) + head[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(out, _whole(made, H, D))
    else:
        at = (row * SPLITS + split) * H + head
        tl.store(SIZES + at * 2, most)
        tl.store(SIZES + at * 2 + 1, total)
        for n in tl.static_range(8):
            tl.store(PARTS + (at[:, None] * 8 + n) * WORDS + word[None, :], o[n])


@triton.jit
def _part(PARTS, SIZES, row, head, word, n: tl.constexpr, most, H: tl.constexpr, WORDS: tl.constexpr,
          SPLITS: tl.constexpr):  # fmt: skip
    """Return plane n of all parts, summed in their order."""
    o = tl.zeros((head.shape[0], WORDS), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (row * SPLITS + split) * H + head
        o += (
            tl.load(PARTS + (at[:, None] * 8 + n) * WORDS + word[None, :])
            * tl.exp2(tl.load(SIZES + 2 * at) - most)[:, None]
        )
    return o


@triton.jit
def _merge(
    PARTS, SIZES, SINK, COS, SIN, OUT, H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    word = tl.arange(0, D // 8)
    sink = tl.load(SINK + head) * 1.4426950408889634
    most = sink
    for split in tl.static_range(SPLITS):
        most = tl.maximum(most, tl.load(SIZES + 2 * ((row * SPLITS + split) * H + head)))
    total = tl.exp2(sink - most)
    for split in tl.static_range(SPLITS):
        at = (row * SPLITS + split) * H + head
        total += tl.load(SIZES + 2 * at + 1) * tl.exp2(tl.load(SIZES + 2 * at) - most)
    o = (
        _part(PARTS, SIZES, row, head, word, 0, most, H, D // 8, SPLITS),
        _part(PARTS, SIZES, row, head, word, 1, most, H, D // 8, SPLITS),
        _part(PARTS, SIZES, row, head, word, 2, most, H, D // 8, SPLITS),
        _part(PARTS, SIZES, row, head, word, 3, most, H, D // 8, SPLITS),
        _part(PARTS, SIZES, row, head, word, 4, most, H, D // 8, SPLITS),
        _part(PARTS, SIZES, row, head, word, 5, most, H, D // 8, SPLITS),
        _part(PARTS, SIZES, row, head, word, 6, most, H, D // 8, SPLITS),
        _part(PARTS, SIZES, row, head, word, 7, most, H, D // 8, SPLITS),
    )
    made = _finished(o, total, COS, SIN, row, D, ROPE)
    tl.store(OUT + row * (H * D) + head[:, None] * D + tl.arange(0, D)[None, :], _whole(made, HEADS, D))


def sparse_attention(
    queries: torch.Tensor,
    ring: torch.Tensor,
    record: torch.Tensor,
    positions: torch.Tensor,
    floors: torch.Tensor,
    window: int,
    entries: torch.Tensor,
    pages: torch.Tensor,
    owner: torch.Tensor,
    selection: torch.Tensor,
    sink: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    splits: int,
) -> torch.Tensor:
    """Return bfloat16 [t, H, D] of rotated `queries` bfloat16 [t, H, D], turned back by their positions.

    Row i sees window rows `positions[i] - window + 1` .. `positions[i]`, not below `floors[i]`, in `ring[record[i]]`
    (uint8 [n, capacity, D + D / 32]), and entries `selection[i]` (int32 [t, k], -1: none) of the sequence `owner[i]` in
    `entries` (uint8 [pages, e, D / 2 + D / 16]) through `pages` (int32 [b, p]). Last two axes of both are dense. Index
    tensors int64 [t]; `sink` float32 [H]; `cos`, `sin` float32 [t, r / 2]; window and k are multiples of 64, k may be 0.
    `splits` parts of a row's keys are computed side by side: a row's bits depend on it and on nothing else. Keys are
    exact in bfloat16; softmax weights are rounded to it, sums are float32.
    """
    rows, heads, width = queries.shape
    ring, words = ring.view(torch.int64), entries.view(torch.int32)
    out = torch.empty_like(queries)
    parts = sizes = out
    if splits > 1:
        parts = torch.empty(rows, splits, heads, width, dtype=torch.float32, device=queries.device)
        sizes = torch.empty(rows, splits, heads, 2, dtype=torch.float32, device=queries.device)
    upright = chip.has_tensor_memory(queries.device)
    _sparse_attention[(rows, splits)](
        queries, ring, record, positions, floors, words, pages, owner, selection, sink, cos, sin, out, parts, sizes,
        ring.shape[1], ring.stride(0), words.stride(0), pages.stride(0), entries.shape[1],
        H=heads, D=width, ROPE=2 * cos.shape[1], WINDOW=window, TOP=selection.shape[1], TILE=_TILE, SPLITS=splits,
        SCALE=width**-0.5 * 1.4426950408889634, PTX=chip.speaks_ptx(), UPRIGHT=upright, num_warps=8,
        # Pipelined, triton 3.6 does not compile it for chips with tensor memory, and no version for AMD's.
        num_stages=2 if chip.speaks_ptx() and not upright else 1,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows, heads // 16)](
            parts, sizes, sink, cos, sin, out, H=heads, D=width, ROPE=2 * cos.shape[1], SPLITS=splits, HEADS=16,
            num_warps=8,
        )  # fmt: skip
    return out
