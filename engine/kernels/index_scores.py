# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Index scan: scores of all visible entries from their paged four-bit keys; rows of one sequence share the reading.

Entries are the rows of the matrix product, so that unpacked keys need not leave registers, and heads its columns.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, fp4_quarters, joined_quarters, plane_scale
from engine.kernels.overlap import after_kernels_before, fetch_ahead, options, overlaps

_PROGRAMS = 528
"""Programs that a GPU of 132 multiprocessors holds: longer runs of tiles share one loading of the queries."""


@triton.jit
def pages_of(PAGES, begin, end, PER_PAGE: tl.constexpr):
    """Return the pages of entries begin .. end - 1, up to 32."""
    place = begin // PER_PAGE + tl.arange(0, 32)
    return tl.load(PAGES + place, mask=place * PER_PAGE < end, other=0)


@triton.jit
def page_of(pages, begin, entry, PER_PAGE: tl.constexpr):
    """Return int64 the page of an entry, of `pages_of` entries from `begin` on."""
    here = tl.arange(0, 32) == entry // PER_PAGE - begin // PER_PAGE
    return tl.sum(tl.where(here, pages, 0), axis=0).to(tl.int64)


@triton.jit
def query_quarters(HEADS, at, used, COLUMNS: tl.constexpr, KEY: tl.constexpr):
    """Return bfloat16 [columns, KEY] of queries, in the order of `joined_quarters`."""
    x = tl.load(HEADS + at[:, None] * KEY + tl.arange(0, KEY)[None, :], mask=used[:, None], other=0.0)
    return tl.reshape(tl.permute(tl.reshape(x, (COLUMNS, 4, 4, 2, 4)), (0, 4, 2, 1, 3)), (COLUMNS, KEY))


@triton.jit
def part_of(
    HEADS, WEIGHTS, VISIBLE, sequence, first, EACH: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr
):
    """Return bfloat16 [KEY, ROWS * H] of the queries of some rows of a sequence, their weights, and what rows see.

    Absent ones are zero.
    """
    column = first * H + tl.arange(0, ROWS * H)
    used = column < EACH * H
    at = sequence * (EACH * H) + column
    # Positive parts are doubled below.
    weight = tl.load(WEIGHTS + at, mask=used, other=0.0) * (0.5 * UNPLANED)
    row = first + tl.arange(0, ROWS)
    seen = tl.load(VISIBLE + sequence * EACH + row, mask=row < EACH, other=0)
    return tl.trans(query_quarters(HEADS, at, used, ROWS * H, KEY)), weight, seen


@triton.jit
def store_part(
    keys, queries, weight, seen, SCORES, score_stride, sequence, first, place,
    EACH: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the scores of entries `place` for some rows of a sequence."""
    products = tl.dot(keys, queries)
    # Twice the positive part: the addition takes a magnitude for nothing, a maximum has half its rate.
    products = (products + tl.abs(products)) * weight[None, :]
    scores = tl.sum(tl.reshape(products, (TILE, ROWS, H)), axis=2)
    row = first + tl.arange(0, ROWS)
    where = SCORES + (sequence * EACH + row)[None, :].to(tl.int64) * score_stride + place[:, None]
    tl.store(where, scores, mask=place[:, None] < seen[None, :])


@triton.jit
def _index_scores(
    HEADS, WEIGHTS, CODES, SCALES, PAGES, VISIBLE, SCORES,
    page_stride, code_stride, scale_stride, score_stride, SHIFTS,
    EACH: tl.constexpr, PADDED: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr, FETCHED: tl.constexpr,
    WORDS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    sequence = tl.program_id(1)
    begin = tl.program_id(0) * (TILE * TILES)
    # One by one: so the compiler knows that all threads go through as many tiles.
    visible = tl.load(VISIBLE + sequence * EACH)
    for each in tl.static_range(1, EACH):
        visible = tl.maximum(visible, tl.load(VISIBLE + sequence * EACH + each))
    num_tiles = tl.minimum(tl.cdiv(visible - begin, TILE), TILES)
    inside = tl.arange(0, TILE)
    group = tl.arange(0, 4)
    half = tl.arange(0, KEY // 4)[None, :]
    if HELD:
        pages = pages_of(PAGES + sequence * page_stride, begin, begin + num_tiles * TILE, PER_PAGE)
        # The first tiles come while queries do.
        for tile in tl.static_range(FETCHED):
            page = page_of(pages, begin, begin + tile * TILE, PER_PAGE)
            lines = (begin + tile * TILE) % PER_PAGE + tl.arange(0, TILE // 2) * 2
            fetch_ahead(CODES + page * code_stride + lines * (KEY // 4))
    if WORDS:
        shifts = tl.load(SHIFTS + group)
    # Rows of a sequence in one part or two, whose products leave enough registers.
    ROWS: tl.constexpr = PADDED // PARTS
    queries, weight, seen = part_of(HEADS, WEIGHTS, VISIBLE, sequence, 0, EACH, ROWS, H, KEY)
    if PARTS == 2:
        queries2, weight2, seen2 = part_of(HEADS, WEIGHTS, VISIBLE, sequence, ROWS, EACH, ROWS, H, KEY)
    # Stages said here: all loads are fetched ahead, also those that no product reads.
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        first = begin + tile * TILE
        if HELD:
            page = page_of(pages, begin, first, PER_PAGE)
        else:
            # A page per entry, though they are all the same: loads through tensors are pipelined, through scalars not.
            page = tl.load(PAGES + sequence * page_stride + (first + inside) // PER_PAGE).to(tl.int64)
        entry = first % PER_PAGE + inside
        # In two dimensions: in three, Triton 3.6 gives a warp 32 entries of 16 bytes, which asks for every sector twice.
        codes = tl.load(CODES + (page * code_stride + entry * (KEY // 4))[:, None] + half)
        codes = tl.reshape(codes, (TILE, 4, 8))
        if WORDS:
            # More threads than entries could not fetch their bytes ahead. Shifts that are loaded may have any layout.
            scales = (tl.load(SCALES + page * scale_stride + entry)[:, None] >> shifts[None, :]) & 255
        else:
            scales = tl.load(SCALES + (page * scale_stride + entry * 4)[:, None] + group[None, :])
        spread = tl.broadcast_to(tl.expand_dims(plane_scale(scales), 2), (TILE, 4, 8))
        keys = joined_quarters(fp4_quarters(codes, spread, PTX), TILE)
        entries = first + inside
        store_part(keys, queries, weight, seen, SCORES, score_stride, sequence, 0, entries, EACH, ROWS, H, TILE)
        if PARTS == 2:
            store_part(
                keys, queries2, weight2, seen2, SCORES, score_stride, sequence, ROWS, entries, EACH, ROWS, H, TILE
            )


class Shape(NamedTuple):
    """How a scan is cut."""

    tile: int
    """Entries at a time."""
    tiles: int
    """Tiles a program goes through."""
    warps: int
    stages: int
    pdl: bool
    registers: int | None
    """The most a thread may have."""
    held: bool
    """Load a program's page numbers (of 32 pages at most) once, instead of for every tile."""
    fetched: int
    """Tiles that are asked for before the queries, if `held`; NVIDIA only."""


def shape_of(sequences: int, entries: int, padded: int) -> Shape:
    """Return how `entries` of each of `sequences` are scanned by `padded` rows; no score depends on it."""
    tile = 128
    each = triton.cdiv(entries, tile) * sequences // _PROGRAMS
    return Shape(
        tile=tile,
        tiles=max(4, min(32, triton.next_power_of_2(each))),
        warps=4 if padded <= 2 else 8,
        stages=4,
        held=True,
        fetched=0,
        registers=None,
        pdl=overlaps(),
    )


@functools.cache
def _shifts(device: torch.device) -> torch.Tensor:
    """Return where the bytes of a word begin."""
    return torch.arange(0, 32, 8, dtype=torch.int32, device=device)


def index_scores(
    heads: torch.Tensor,
    weights: torch.Tensor,
    key_codes: torch.Tensor,
    key_scales: torch.Tensor,
    pages: torch.Tensor,
    visible: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    """Store `scores[i, j]` = sum over heads of weight * relu(query . key j) for j < visible[i]; others stay as they are.

    `heads` bfloat16 [t, h, w] (values of the index format), `weights` float32 [t, h], t = b * rows of each sequence,
    sequence by sequence; `key_codes` uint8 [pages, e, w / 2], `key_scales` uint8 [pages, e, w / 32], parts of KV memory,
    their last two axes dense, w = 128, e a multiple of 128; `pages` int32 or int64 [b, p]; `visible` int32 [t]; `scores`
    float32 [t, n], n >= p * e. Scales are within 2^-65 and 2^61. Products are exact; sums are float32.
    """
    rows, num_heads, width = heads.shape
    each = rows // len(pages)
    padded = triton.next_power_of_2(each)
    per_page = key_codes.shape[1]
    shape = shape_of(len(pages), pages.shape[1] * per_page, padded)
    grid = (triton.cdiv(pages.shape[1] * per_page, shape.tile * shape.tiles), len(pages))
    held = shape.held and per_page % shape.tile == 0 and shape.tile * shape.tiles <= 32 * per_page
    words = 32 * shape.warps > shape.tile
    codes = key_codes.view(torch.int16)
    scales = key_scales.view(torch.int32) if words else key_scales
    more = {} if shape.registers is None else {"maxnreg": shape.registers}
    _index_scores[grid](
        heads, weights, codes, scales, pages, visible, scores,
        pages.stride(0), codes.stride(0), scales.stride(0), scores.stride(0),
        EACH=each, PADDED=padded, H=num_heads, KEY=width, PER_PAGE=per_page, TILE=shape.tile, TILES=shape.tiles,
        STAGES=shape.stages, HELD=held, FETCHED=shape.fetched, WORDS=words, PARTS=2 if padded > 4 else 1,
        SHIFTS=_shifts(heads.device), PDL=shape.pdl, PTX=chip.speaks_ptx(), num_warps=shape.warps,
        num_stages=shape.stages, **more, **options(shape.pdl),
    )  # fmt: skip
