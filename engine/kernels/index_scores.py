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
from engine.kernels.device import UNPLANED, fp4_quarters, grouped_quarter, joined_quarters, plane_scale
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
def quarters_of(x, COLUMNS: tl.constexpr, KEY: tl.constexpr):
    """Return the quarters [KEY / 4, COLUMNS] of queries of `query_quarters`, each of which meets a quarter of keys."""
    low, high = tl.split(tl.permute(tl.reshape(x, (COLUMNS, 2, 2, KEY // 4)), (0, 2, 3, 1)))
    first, second = tl.split(tl.permute(low, (0, 2, 1)))
    third, fourth = tl.split(tl.permute(high, (0, 2, 1)))
    return tl.trans(first), tl.trans(second), tl.trans(third), tl.trans(fourth)


@triton.jit
def scales_of(words, shifts, PTX: tl.constexpr):
    """Return `plane_scale` of the bytes of int32 `words` that begin at bits `shifts` (0, 8, 16, 24); both broadcast."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x;
            prmt.b32 x, $1, 0, $2;  mad.lo.u32 x, x, 128, 0x2100;  cvt.u16.u32 $0, x;
            }""",
            "=h,r,r",
            [words, 0x4440 + (shifts >> 3)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=1,
        )
    else:
        return plane_scale((words >> shifts) & 255)


@triton.jit
def part_of(
    HEADS, WEIGHTS, VISIBLE, sequence, first, EACH: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Return bfloat16 [KEY, ROWS * H] of the queries of some rows of a sequence, their weights, and what rows see.

    Absent ones are zero. Queries are one tensor in a tuple, or four, if `APART`.
    """
    column = first * H + tl.arange(0, ROWS * H)
    used = column < EACH * H
    at = sequence * (EACH * H) + column
    # Positive parts are doubled below.
    weight = tl.load(WEIGHTS + at, mask=used, other=0.0) * (0.5 * UNPLANED)
    row = first + tl.arange(0, ROWS)
    seen = tl.load(VISIBLE + sequence * EACH + row, mask=row < EACH, other=0)
    x = query_quarters(HEADS, at, used, ROWS * H, KEY)
    return quarters_of(x, ROWS * H, KEY) if APART else (tl.trans(x),), weight, seen


@triton.jit
def store_part(
    keys, part, SCORES, score_stride, sequence, first, place,
    EACH: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the scores of entries `place` for some rows of a sequence, of `part_of`."""
    queries, weight, seen = part
    products = tl.dot(keys[0], queries[0])
    for quarter in tl.static_range(1, len(keys)):
        products = tl.dot(keys[quarter], queries[quarter], products)
    # Twice the positive part: the addition takes a magnitude for nothing, a maximum has half its rate.
    products = (products + tl.abs(products)) * weight[None, :]
    scores = tl.sum(tl.reshape(products, (TILE, ROWS, H)), axis=2)
    row = first + tl.arange(0, ROWS)
    where = SCORES + (sequence * EACH + row)[None, :].to(tl.int64) * score_stride + place[:, None]
    tl.store(where, scores, mask=place[:, None] < seen[None, :])


@kernel
def _index_scores(
    HEADS, WEIGHTS, CODES, SCALES, PAGES, VISIBLE, SCORES, held,
    page_stride, code_stride, scale_stride, score_stride, SHIFTS,
    EACH: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    sequence = tl.program_id(1)
    first_row = 0 if ROWS * PARTS >= EACH else tl.program_id(2) * (ROWS * PARTS)
    begin = tl.program_id(0) * (TILE * TILES)
    # One by one: so the compiler knows that all threads go through as many tiles.
    visible = tl.load(VISIBLE + sequence * EACH)
    for each in tl.static_range(1, EACH):
        visible = tl.maximum(visible, tl.load(VISIBLE + sequence * EACH + each))
    num_tiles = tl.minimum(tl.cdiv(visible - begin, TILE), TILES)
    inside = tl.arange(0, TILE)
    group = tl.arange(0, 4)
    lines = inside[:, None] * (KEY // 4) + tl.arange(0, KEY // 4)[None, :]
    # All that the table has: so pages need not be waited for until it is known how many are seen.
    pages = pages_of(PAGES + sequence * page_stride, begin, held, PER_PAGE)
    if WORDS:
        shifts = tl.load(SHIFTS + group)
    # Rows of a sequence in parts, whose products leave enough registers.
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (part_of(HEADS, WEIGHTS, VISIBLE, sequence, first_row + part * ROWS, EACH, ROWS, H, KEY, APART),)
    # Stages said here: all loads are fetched ahead, also those that no product reads.
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        first = begin + tile * TILE
        page = page_of(pages, begin, first, PER_PAGE)
        at = first % PER_PAGE
        # In two dimensions: in three, Triton 3.6 gives a warp 32 entries of 16 bytes, which asks for every sector twice.
        codes = tl.load(CODES + page * code_stride + at * (KEY // 4) + lines)
        codes = tl.reshape(codes, (TILE, 4, 8))
        if WORDS:
            # More threads than entries could not fetch their bytes ahead. Shifts that are loaded may have any layout.
            words = tl.load(SCALES + page * scale_stride + at + inside)
            scales = scales_of(words[:, None], shifts[None, :], PTX)
        else:
            scales = plane_scale(
                tl.load(SCALES + page * scale_stride + at * 4 + (inside[:, None] * 4 + group[None, :]))
            )
        spread = tl.broadcast_to(tl.expand_dims(scales, 2), (TILE, 4, 8))
        quarters = fp4_quarters(codes, spread, PTX)
        if APART:
            keys = ()
            for quarter in tl.static_range(4):
                keys += (tl.reshape(grouped_quarter(quarters[quarter], TILE), (TILE, KEY // 4)),)
        else:
            keys = (joined_quarters(quarters, TILE),)
        entries = first + inside
        for part in tl.static_range(PARTS):
            row = first_row + part * ROWS
            store_part(keys, parts[part], SCORES, score_stride, sequence, row, entries, EACH, ROWS, H, TILE)


class Shape(NamedTuple):
    """How a scan is cut."""

    tile: int
    """Entries at a time."""
    tiles: int
    """Tiles a program goes through, on 32 pages at most."""
    warps: int
    stages: int
    pdl: bool
    registers: int | None
    """The most a thread may have."""
    words: bool
    """Load an entry's scales at once."""
    rows: int
    """Rows of a sequence that are one product."""
    parts: int
    """Such products of a program; other rows are other programs'."""


def shape_of(sequences: int, entries: int, padded: int) -> Shape:
    """Return how `entries` of each of `sequences` are scanned by `padded` rows; no score depends on it."""
    tile = 128
    each = cdiv(entries, tile) * sequences // _PROGRAMS
    return Shape(
        tile=tile,
        tiles=max(4, min(32, next_power_of_2(each))),
        warps=4 if padded <= 2 else 8,
        stages=4,
        registers=None,
        pdl=overlaps(),
        words=padded > 2,
        rows=min(4, padded),
        parts=max(1, padded // 4),
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
    padded = next_power_of_2(each)
    per_page = key_codes.shape[1]
    shape = shape_of(len(pages), pages.shape[1] * per_page, padded)
    grid = (
        cdiv(pages.shape[1] * per_page, shape.tile * shape.tiles),
        len(pages),
        cdiv(each, shape.rows * shape.parts),
    )
    words = shape.words or 32 * shape.warps > shape.tile
    codes = key_codes.view(torch.int16)
    scales = key_scales.view(torch.int32) if words else key_scales
    more = {} if shape.registers is None else {"maxnreg": shape.registers}
    _index_scores[grid](
        heads, weights, codes, scales, pages, visible, scores, pages.shape[1] * per_page,
        pages.stride(0), codes.stride(0), scales.stride(0), scores.stride(0),
        EACH=each, H=num_heads, KEY=width, PER_PAGE=per_page, TILE=shape.tile, TILES=shape.tiles,
        STAGES=shape.stages, WORDS=words, ROWS=shape.rows, PARTS=shape.parts, APART=shape.warps < 4,
        SHIFTS=_shifts(heads.device), PDL=shape.pdl, PTX=chip.speaks_ptx(), num_warps=shape.warps,
        num_stages=shape.stages, **more, **options(shape.pdl),
    )  # fmt: skip
