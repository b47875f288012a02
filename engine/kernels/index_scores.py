# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Index scan: scores of all visible entries from their paged four-bit keys; rows of one sequence share the reading.

Entries are the rows of the matrix product, so that unpacked keys need not leave registers, and heads its columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, fp4_quarters, joined_quarters, plane_scale
from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps

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
def part_of(HEADS, WEIGHTS, VISIBLE, row, end, ROWS: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr):
    """Return bfloat16 [KEY, ROWS * H] of the queries of rows from `row` on, their weights, and what rows see.

    Rows from `end` on are absent: zero.
    """
    at = row * H + tl.arange(0, ROWS * H)
    used = at < end * H
    # Positive parts are doubled below.
    weight = tl.load(WEIGHTS + at, mask=used, other=0.0) * (0.5 * UNPLANED)
    each = row + tl.arange(0, ROWS)
    seen = tl.load(VISIBLE + each, mask=each < end, other=0)
    return tl.trans(query_quarters(HEADS, at, used, ROWS * H, KEY)), weight, seen


@triton.jit
def store_part(
    keys, part, SCORES, score_stride, row, place, ROWS: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Store the scores of entries `place` for rows from `row` on, of `part_of`."""
    queries, weight, seen = part
    products = tl.dot(keys, queries)
    # Twice the positive part: the addition takes a magnitude for nothing, a maximum has half its rate.
    products = (products + tl.abs(products)) * weight[None, :]
    scores = tl.sum(tl.reshape(products, (TILE, ROWS, H)), axis=2)
    where = SCORES + (row + tl.arange(0, ROWS))[None, :].to(tl.int64) * score_stride + place[:, None]
    tl.store(where, scores, mask=place[:, None] < seen[None, :])


@triton.jit
def scan(
    given, strides, start, end,
    H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Score tiles of entries from `begin` on, of `pages_of` there, for rows start .. end - 1, in parts of ROWS."""
    HEADS, WEIGHTS, CODES, SCALES, VISIBLE, SCORES, pages, begin, num_tiles = given
    code_stride, scale_stride, score_stride = strides
    inside = tl.arange(0, TILE)
    groups = inside[:, None] * 4 + tl.arange(0, 4)[None, :]
    lines = inside[:, None] * (KEY // 4) + tl.arange(0, KEY // 4)[None, :]
    # Rows of a sequence in parts, whose products leave enough registers.
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (part_of(HEADS, WEIGHTS, VISIBLE, start + part * ROWS, end, ROWS, H, KEY),)
    # Stages said here: all loads are fetched ahead, also those that no product reads.
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        first = begin + tile * TILE
        page = page_of(pages, begin, first, PER_PAGE)
        at = first % PER_PAGE
        # In two dimensions: in three, Triton 3.6 gives a warp 32 entries of 16 bytes, which asks for every sector twice.
        codes = tl.reshape(tl.load(CODES + page * code_stride + at * (KEY // 4) + lines), (TILE, 4, 8))
        # No more threads than entries: they could not fetch their bytes ahead.
        scales = plane_scale(tl.load(SCALES + page * scale_stride + at * 4 + groups))
        spread = tl.broadcast_to(tl.expand_dims(scales, 2), (TILE, 4, 8))
        keys = joined_quarters(fp4_quarters(codes, spread, PTX), TILE)
        for part in tl.static_range(PARTS):
            store_part(keys, parts[part], SCORES, score_stride, start + part * ROWS, first + inside, ROWS, H, TILE)


@kernel
def _index_scores(
    HEADS, WEIGHTS, CODES, SCALES, PAGES, VISIBLE, SCORES, STARTS, held, each,
    page_stride, code_stride, scale_stride, score_stride,
    H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, UNEVEN: tl.constexpr,
    PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    tl.static_assert(PARTS <= 3)
    after_kernels_before(PDL)
    sequence = tl.program_id(1)
    begin = tl.program_id(0) * (TILE * TILES)
    start, end = sequence * each, sequence * each + each
    if UNEVEN:
        start, end = tl.load(STARTS + sequence), tl.load(STARTS + sequence + 1)
    start += tl.program_id(2) * (ROWS * PARTS)
    # One by one: so the compiler knows that all threads go through as many tiles.
    visible = tl.load(VISIBLE + start, mask=start < end, other=0)
    for row in tl.static_range(1, ROWS * PARTS):
        visible = tl.maximum(visible, tl.load(VISIBLE + start + row, mask=start + row < end, other=0))
    num_tiles = tl.minimum(tl.cdiv(visible - begin, TILE), TILES)
    # All that the table has: so pages need not be waited for until it is known how many are seen.
    pages = pages_of(PAGES + sequence * page_stride, begin, held, PER_PAGE)
    given = (HEADS, WEIGHTS, CODES, SCALES, VISIBLE, SCORES, pages, begin, num_tiles)
    strides = (code_stride, scale_stride, score_stride)
    # No more parts than there are rows for: sequences may have fewer than one of them has. Said without `else`, this takes
    # more registers.
    wanted = tl.cdiv(end - start, ROWS)
    if wanted >= PARTS:
        scan(given, strides, start, end, H, KEY, PER_PAGE, TILE, STAGES, ROWS, PARTS, PTX)
    elif PARTS > 1:
        if wanted == 2:
            scan(given, strides, start, end, H, KEY, PER_PAGE, TILE, STAGES, ROWS, 2, PTX)
        elif wanted == 1:
            scan(given, strides, start, end, H, KEY, PER_PAGE, TILE, STAGES, ROWS, 1, PTX)


class Shape(NamedTuple):
    """How a scan is cut."""

    tile: int
    """Entries at a time; as many threads at most."""
    tiles: int
    """Tiles a program goes through, on 32 pages at most."""
    warps: int
    stages: int
    pdl: bool
    rows: int
    """Rows of a sequence that are one product."""
    parts: int
    """Such products of a program, three at most; other rows are other programs'."""


def shape_of(sequences: int, entries: int, each: int) -> Shape:
    """Return how `entries` of each of `sequences` are scanned by at most `each` rows; no score depends on it."""
    tile = 128
    tiles = cdiv(entries, tile) * sequences // _PROGRAMS
    # One product of four rows takes 3 % less than two of two, which few rows need but one of; more than three parts spill.
    rows, programs = min(2, each), cdiv(each, 6)
    return Shape(
        tile=tile,
        tiles=max(4, min(32, next_power_of_2(tiles))),
        warps=4,
        stages=4,
        pdl=overlaps(),
        rows=rows,
        parts=cdiv(each, rows * programs),
    )


def index_scores(
    heads: torch.Tensor,
    weights: torch.Tensor,
    key_codes: torch.Tensor,
    key_scales: torch.Tensor,
    pages: torch.Tensor,
    visible: torch.Tensor,
    scores: torch.Tensor,
    starts: torch.Tensor | None = None,
    each: int = 0,
) -> None:
    """Store `scores[i, j]` = sum over heads of weight * relu(query . key j) for j < visible[i]; others stay as they are.

    `heads` bfloat16 [t, h, w] (values of the index format), `weights` float32 [t, h], sequence by sequence: t = b * rows
    of each, or with `starts` int32 [b + 1] rows starts[i] to starts[i + 1] - 1 are sequence i's, `each` of them at most,
    and others nobody's: nothing is stored for them. `key_codes` uint8 [pages, e, w / 2], `key_scales` uint8 [pages, e,
    w / 32], parts of KV memory, their last two axes dense, w = 128, e a multiple of 128; `pages` int32 or int64 [b, p];
    `visible` int32 [t]; `scores` float32 [t, n], n >= p * e. Scales are within 2^-65 and 2^61. Products are exact; sums
    are float32, their bits the same however many rows a sequence has.
    """
    rows, num_heads, width = heads.shape
    sequences, per_page = len(pages), key_codes.shape[1]
    held = pages.shape[1] * per_page
    each = rows // sequences if starts is None else each
    shape = shape_of(sequences, held, each)
    codes = key_codes.view(torch.int16)
    grid = (cdiv(held, shape.tile * shape.tiles), sequences, cdiv(each, shape.rows * shape.parts))
    _index_scores[grid](
        heads, weights, codes, key_scales, pages, visible, scores, visible if starts is None else starts, held, each,
        pages.stride(0), codes.stride(0), key_scales.stride(0), scores.stride(0),
        H=num_heads, KEY=width, PER_PAGE=per_page, TILE=shape.tile, TILES=shape.tiles, STAGES=shape.stages,
        ROWS=shape.rows, PARTS=shape.parts, UNEVEN=starts is not None, PDL=shape.pdl, PTX=chip.speaks_ptx(),
        num_warps=shape.warps, num_stages=shape.stages, **options(shape.pdl),
    )  # fmt: skip
