# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Mega attention of decoding and verification: window and selected entries in one softmax with sinks, from packed rows.

One program has all heads of one row and a part of its keys; parts are merged by a second kernel. A tile of keys is
unpacked once, into shared memory, and is value too. The output is turned back by the row's position. Chips that sum
products in tensor memory have a body of their own (`sparse_attention_upright`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, q8_code
from engine.kernels.launch import kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps
from engine.kernels.sparse_attention_keys import entry_keys, entry_words, window_keys
from engine.kernels.sparse_attention_upright import upright


class Shape(NamedTuple):
    """How a launch is cut."""

    heads: int
    """Heads that products take, at least those there are."""
    tile: int
    """Keys at a time."""
    warps: int
    merge_heads: int
    merge_warps: int
    pdl: bool


def shape_of(heads: int, window: int, top: int, splits: int, *, upright: bool) -> Shape:
    """Return the shape of a launch of `window` and `top` keys a row in `splits` parts: nothing of the batch, so that a
    row's bits do not depend on it.
    """
    tile = 64
    if heads >= 64 and not upright and chip.speaks_ptx():
        tile = 128 if window % 128 == top % 128 == (window + top) // 128 % splits == 0 else 64
    # Fewer heads would be multiplied by other instructions, for which keys lie in shared memory twice.
    return Shape(heads if upright else max(64, heads), tile, 8, merge_heads=1, merge_warps=4, pdl=overlaps())


@triton.jit
def _attend(queries, keys, valid, most, total, o, once, SCALE: tl.constexpr):
    """Take one tile of keys [TILE, D] into the running softmax; returns most, total, outputs [H, D].

    `total` [H, 2, 4] is apart for groups of keys that a thread has, and is summed over threads behind the last tile.
    Of chained products the compiler gives the first all warps along the heads, which makes two groups of warps do
    the same: so it is hidden from the second by a loop of one turn (`once` is 1) that holds no product, because the
    product must not wait for registers that are carried into a loop.
    """
    H: tl.constexpr = queries.shape[0]
    TILE: tl.constexpr = keys.shape[0]
    raw = tl.dot(queries, tl.trans(keys))
    scores = tl.zeros((H, TILE), tl.float32)
    for _ in tl.range(0, once):
        scores = tl.where(valid[None, :], raw, float("-inf"))
    new = tl.maximum(most, tl.max(scores, axis=1) * (SCALE * UNPLANED))
    weights = tl.exp2(scores * (SCALE * UNPLANED) - new[:, None])
    old = tl.exp2(most - new)
    grouped = tl.reshape(weights, (H, 2, TILE // 16, 4, 2))
    total = total * old[:, None, None] + tl.sum(tl.sum(grouped, axis=4), axis=2)
    return new, total, tl.dot(weights.to(tl.bfloat16), keys, o * old[:, None])


@triton.jit
def _address(chosen, pages, ENTRIES, entry_stride, per_page, D: tl.constexpr):
    """Return int32 pointers of entries `chosen` int32, through a page table."""
    chosen = tl.maximum(chosen, 0)
    page = tl.load(pages + chosen // per_page).to(tl.int64)
    return ENTRIES + page * entry_stride + (chosen % per_page) * (D // 8 + D // 64)


@triton.jit
def _near(queries, ring, position, floor, most, total, o, begin, end, once, capacity, D: tl.constexpr,
          WINDOW: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Attend over tiles `begin` .. `end` - 1 of the window."""
    inside = tl.arange(0, TILE)
    for tile in tl.range(begin, end, num_stages=1, disable_licm=True):
        seen = position - (WINDOW - 1) + tile * TILE + inside
        valid = seen >= floor
        slot = ring + tl.where(valid, seen % capacity, 0) * (D // 4 + D // 128)
        keys = window_keys(slot, valid, TILE, D, PTX)
        most, total, o = _attend(queries, keys, valid, most, total, o, once, SCALE)
    return most, total, o


@triton.jit
def _far(queries, selection, pages, ENTRIES, entry_stride, per_page, most, total, o, begin, end, once, fetched,
         D: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Attend over tiles `begin` .. `end` - 1 of the selected entries; those of the next tile are held in registers.

    Nothing but codes is read between a tile's store to shared memory and its second product: the barriers before both
    products wait for whatever was asked for.
    """
    inside = tl.arange(0, TILE)
    words, packed, chosen, entry, later = fetched
    for tile in tl.range(begin, end, num_stages=1, disable_licm=True):
        keys = entry_keys(words, packed, TILE, D, PTX)
        words, packed = entry_words(entry, chosen >= 0, D)
        valid = tl.load(selection + tile * TILE + inside) >= 0
        most, total, o = _attend(queries, keys, valid, most, total, o, once, SCALE)
        chosen = later
        entry = _address(chosen, pages, ENTRIES, entry_stride, per_page, D)
        later = _chosen(selection, tile + 3, end, TILE)
    return most, total, o


@triton.jit
def _fetched(selection, pages, ENTRIES, entry_stride, per_page, begin, end, D: tl.constexpr, TILE: tl.constexpr):
    """Return codes and scales of tile `begin`, entries and pointers of the tile read next, entries of that after it."""
    chosen = _chosen(selection, begin, end, TILE)
    later = _chosen(selection, begin + 1, end, TILE)
    entry = _address(chosen, pages, ENTRIES, entry_stride, per_page, D)
    words, packed = entry_words(entry, chosen >= 0, D)
    chosen = later
    later = _chosen(selection, begin + 2, end, TILE)
    entry = _address(chosen, pages, ENTRIES, entry_stride, per_page, D)
    return words, packed, chosen, entry, later


@triton.jit
def _chosen(selection, tile, end, TILE: tl.constexpr):
    """Return int32 [TILE] entries of a tile, -1 beyond the last tile."""
    at = tile * TILE + tl.arange(0, TILE)
    return tl.load(selection + at, mask=at < end * TILE, other=-1)


@triton.jit
def _finished(o, total, COS, SIN, row, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    """Return bfloat16 [ROWS, D] of outputs, divided by the softmax's total and turned back."""
    real, imaginary = tl.split(tl.reshape(o * (1.0 / total * UNPLANED)[:, None], (ROWS, D // 2, 2)))
    pair = tl.arange(0, D // 2) - (D - ROPE) // 2
    at = row * (ROPE // 2) + pair
    cos = tl.load(COS + at, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(SIN + at, mask=pair >= 0, other=0.0)[None, :]
    turned = tl.join(real * cos + imaginary * sin, imaginary * cos - real * sin)
    return tl.reshape(turned.to(tl.bfloat16), (ROWS, D))


@triton.jit
def _store(
    made, OUT, SCALES, row, head, here, ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, QUANTIZED: tl.constexpr
):
    """Store bfloat16 [ROWS, D] of some heads of a row, as it is or as a quantized linear reads it."""
    whole = head[:, None] * D + tl.arange(0, D)[None, :]
    if QUANTIZED:
        codes, scales = q8_code(tl.reshape(made.to(tl.float32), (ROWS, D // 32, 32)))
        tl.store(OUT + row * (H * D) + whole, tl.reshape(codes, (ROWS, D)), mask=here[:, None])
        groups = head[:, None] * (D // 32) + tl.arange(0, D // 32)[None, :]
        tl.store(SCALES + row * (H * D // 32) + groups, scales.to(tl.uint8), mask=here[:, None])
    else:
        tl.store(OUT + row * (H * D) + whole, made, mask=here[:, None])


@kernel
def _sparse_attention(
    Q, RING, RECORD, POSITIONS, FLOORS, ENTRIES, PAGES, OWNER, SELECTION, SINK, COS, SIN, OUT, SCALES, PARTS, SIZES,
    capacity, record_units, entry_units, page_stride, per_page,
    UNIT: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr, TOP: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr, PTX: tl.constexpr, UPRIGHT: tl.constexpr,
    QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.arange(0, HEADS)
    here = head < H
    whole = head[:, None] * D + tl.arange(0, D)[None, :]
    record_stride, entry_stride = record_units * UNIT, entry_units * UNIT
    ALL: tl.constexpr = WINDOW // TILE + TOP // TILE
    begin = split * ALL // SPLITS
    end = (split + 1) * ALL // SPLITS
    if UPRIGHT:
        most, total, o = upright(
            Q, RING, RECORD, POSITIONS, FLOORS, ENTRIES, PAGES, OWNER, SELECTION,
            capacity, record_stride, entry_stride, page_stride, per_page, row, begin, end,
            H, D, WINDOW, TOP, TILE, SCALE, PTX,
        )  # fmt: skip
    else:
        # Volatile, they are not put off until the queries have come.
        position = tl.load(POSITIONS + row, volatile=True)
        floor = tl.maximum(tl.load(FLOORS + row, volatile=True), 0)
        ring = RING + tl.load(RECORD + row, volatile=True) * record_stride
        pages = PAGES + tl.load(OWNER + row) * page_stride
        selection = SELECTION + row * TOP
        far = tl.maximum(begin - WINDOW // TILE, 0)
        far_end = end - WINDOW // TILE
        fetched = _fetched(selection, pages, ENTRIES, entry_stride, per_page, far, far_end, D, TILE)
        if HEADS > H:
            queries = tl.load(Q + row * (H * D) + whole, mask=here[:, None], other=0.0)
        else:
            queries = tl.load(Q + row * (H * D) + whole)
        o = tl.zeros((HEADS, D), tl.float32)
        most = tl.full((HEADS,), -1e30, tl.float32)
        total = tl.zeros((HEADS, 2, 4), tl.float32)
        once = tl.minimum(end - begin, 1)
        most, total, o = _near(
            queries, ring, position, floor, most, total, o, begin, tl.minimum(end, WINDOW // TILE), once, capacity,
            D, WINDOW, TILE, SCALE, PTX,
        )  # fmt: skip
        most, total, o = _far(
            queries, selection, pages, ENTRIES, entry_stride, per_page, most, total, o, far, far_end, once, fetched,
            D, TILE, SCALE, PTX,
        )  # fmt: skip
        total = tl.sum(tl.sum(total, axis=2), axis=1)
    if SPLITS == 1:
        total += tl.exp2(tl.load(SINK + head, mask=here, other=0.0) * 1.4426950408889634 - most)
        made = _finished(o, total, COS, SIN, row, HEADS, D, ROPE)
        _store(made, OUT, SCALES, row, head, here, HEADS, H, D, QUANTIZED)
    else:
        part = row * SPLITS + split
        tl.store(SIZES + part * (2 * H) + head, most, mask=here)
        tl.store(SIZES + part * (2 * H) + H + head, total, mask=here)
        tl.store(PARTS + part * (H * D) + whole, o, mask=here[:, None])


@kernel
def _merge(
    PARTS, SIZES, SINK, COS, SIN, OUT, SCALES, H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
    SPLITS: tl.constexpr, EVERY: tl.constexpr, HEADS: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    whole = head[:, None] * D + tl.arange(0, D)[None, :]
    split = tl.arange(0, EVERY)
    part = row * SPLITS + split
    sizes = SIZES + part[:, None] * (2 * H) + head[None, :]
    most = tl.load(sizes, mask=(split < SPLITS)[:, None], other=float("-inf"))
    total = tl.load(sizes + H, mask=(split < SPLITS)[:, None], other=0.0)
    # All parts are asked for before one is used.
    o = tl.load(
        PARTS + part[:, None, None] * (H * D) + whole[None, :, :], mask=(split < SPLITS)[:, None, None], other=0.0
    )
    sink = tl.load(SINK + head) * 1.4426950408889634
    top = tl.maximum(tl.max(most, axis=0), sink)
    share = tl.exp2(most - top[None, :])
    total = tl.sum(total * share, axis=0) + tl.exp2(sink - top)
    o = tl.sum(o * share[:, :, None], axis=0)
    made = _finished(o, total, COS, SIN, row, HEADS, D, ROPE)
    _store(made, OUT, SCALES, row, head, head < H, HEADS, H, D, QUANTIZED)


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
    *,
    quantized: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return bfloat16 [t, H, D] of rotated `queries` bfloat16 [t, H, D], turned back by their positions; `quantized`: its
    e4m3 codes uint8 [t, H D] and e8m0 scales uint8 [t, H D / 32] instead, as `quantize_rows` makes them.

    Row i sees window rows `positions[i] - window + 1` .. `positions[i]`, not below `floors[i]`, in `ring[record[i]]`
    (uint8 [n, capacity, D + D / 32]), and entries `selection[i]` (int32 [t, k], -1: none) of the sequence `owner[i]` in
    `entries` (uint8 [pages, e, D / 2 + D / 16]) through `pages` (int32 [b, p]). Last two axes of both are dense. Index
    tensors int64 [t]; `sink` float32 [H]; `cos`, `sin` float32 [t, r / 2]; window and k are multiples of 64, k may be 0.
    `splits` parts of a row's keys are computed side by side: a row's bits depend on it and on nothing else. Keys are
    exact in bfloat16; softmax weights are rounded to it, sums are float32.
    """
    rows, heads, width = queries.shape
    ptx, upright = chip.speaks_ptx(), chip.has_tensor_memory(queries.device)
    shape = shape_of(heads, window, selection.shape[1], splits, upright=upright)
    ring, words = ring.view(torch.int64 if upright else torch.int32), entries.view(torch.int32)
    # Known to be multiples of 16 bytes, rows are read 16 bytes at a time.
    unit = 4 if not upright and ring.stride(0) % 4 == words.stride(0) % 4 == 0 else 1
    out, scales, made = _outputs(queries, quantized)
    parts = sizes = out
    if splits > 1:
        parts = torch.empty(rows, splits, heads, width, dtype=torch.float32, device=queries.device)
        sizes = torch.empty(rows, splits, 2, heads, dtype=torch.float32, device=queries.device)
    _sparse_attention[(rows, splits)](
        queries, ring, record, positions, floors, words, pages, owner, selection, sink, cos, sin, out, scales, parts, sizes,
        ring.shape[1], ring.stride(0) // unit, words.stride(0) // unit, pages.stride(0), entries.shape[1],
        UNIT=unit, H=heads, HEADS=shape.heads, D=width, ROPE=2 * cos.shape[1], WINDOW=window, TOP=selection.shape[1], TILE=shape.tile, SPLITS=splits,
        SCALE=width**-0.5 * 1.4426950408889634, PTX=ptx, UPRIGHT=upright,
        QUANTIZED=quantized, PDL=shape.pdl, num_warps=shape.warps, num_stages=1, **options(shape.pdl),
    )  # fmt: skip
    if splits > 1:
        _merge[(rows, heads // shape.merge_heads)](
            parts, sizes, sink, cos, sin, out, scales, H=heads, D=width, ROPE=2 * cos.shape[1], SPLITS=splits,
            EVERY=next_power_of_2(splits), HEADS=shape.merge_heads, QUANTIZED=quantized, PDL=shape.pdl,
            num_warps=shape.merge_warps, **options(shape.pdl),
        )  # fmt: skip
    return made


def _outputs(
    queries: torch.Tensor, quantized: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Return where values or codes go, where scales go, and what the op returns."""
    if not quantized:
        out = torch.empty_like(queries)
        return out, out, out
    rows, heads, width = queries.shape
    out = torch.empty(rows, heads * width, dtype=torch.uint8, device=queries.device)
    scales = torch.empty(rows, heads * width // 32, dtype=torch.uint8, device=queries.device)
    return out, scales, (out, scales)
