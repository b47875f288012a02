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
from engine.kernels.device import UNPLANED, fp4_bytes, fp4_quarters, inverse_power, joined_quarters, plane_scale, power
from engine.kernels.overlap import after_kernels_before, fetch_ahead, options, overlaps

_PROGRAMS = 528
"""Programs that a GPU of 132 multiprocessors holds: longer runs of tiles share one loading of the queries."""


@triton.jit
def four(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the parts [ROWS, WIDTH] of [ROWS, 4, WIDTH]: no value leaves its thread."""
    even, odd = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, 2, WIDTH)), (0, 3, 1, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


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
def key_bytes(pairs, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Return e4m3 [ROWS, 32] of a group of keys uint8 [ROWS, 16], even elements first, times 2^-6."""
    low, high = fp4_bytes(pairs, PTX)
    both = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (ROWS, 32))
    return both.to(tl.float8e4nv, bitcast=True)


@triton.jit
def key_scale(scales, g: tl.constexpr):
    """Return float32 powers of two of the e8m0 codes in byte g of words."""
    moved = scales >> 1 if g == 3 else scales << (23 - 8 * g)
    return (moved & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def query_group(HEADS, at, used, g: tl.constexpr, KEY: tl.constexpr):
    """Return bfloat16 [columns, 32]: group g of queries."""
    place = at[:, None] * KEY + g * 32 + tl.arange(0, 32)[None, :]
    return tl.load(HEADS + place, mask=used[:, None], other=0.0)


@triton.jit
def query_quarters(HEADS, at, used, COLUMNS: tl.constexpr, KEY: tl.constexpr):
    """Return bfloat16 [columns, KEY] of queries, in the order of `joined_quarters`."""
    x = tl.load(HEADS + at[:, None] * KEY + tl.arange(0, KEY)[None, :], mask=used[:, None], other=0.0)
    return tl.reshape(tl.permute(tl.reshape(x, (COLUMNS, 4, 4, 2, 4)), (0, 4, 2, 1, 3)), (COLUMNS, KEY))


@triton.jit
def most_of(x):
    """Return float32 [columns]: the largest magnitude of each row."""
    return tl.max(tl.abs(x.to(tl.float32)), axis=1)


@triton.jit
def query_scale(most):
    """Return int32 codes of powers of two that bring a magnitude of `most` to 2^8, the highest exponent of e4m3."""
    return 262 - tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 9)


@triton.jit
def query_bytes(x, code, COLUMNS: tl.constexpr):
    """Return e4m3 [32, columns] of queries [columns, 32] times 2^(code - 127), even elements first, as `key_bytes`."""
    narrow = (x.to(tl.float32) * power(code)[:, None]).to(tl.float8e4nv)
    return tl.trans(tl.reshape(tl.permute(tl.reshape(narrow, (COLUMNS, 16, 2)), (0, 2, 1)), (COLUMNS, 32)))


@triton.jit
def fits(part, most):
    """Return whether queries' groups are exact in e4m3 with the scale of whole queries: their least step is part / 12."""
    return ((part == 0.0) | (part >= most * 0.0001220703125)).to(tl.int32)


@triton.jit
def _scan(
    q0, q1, q2, q3, f0, f1, f2, f3, weight,
    CODES, SCALES, PAGES, SCORES, seen, sequence, begin, num_tiles,
    page_stride, code_stride, scale_stride, score_stride,
    EACH: tl.constexpr, PADDED: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr, FOLDED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Score tiles with queries in e4m3; FOLDED: one factor a query, which `weight` makes up for, else one a group."""
    row = tl.arange(0, PADDED)
    inside = tl.arange(0, TILE)
    byte = tl.arange(0, KEY // 2)[None, :]
    if HELD:
        pages = pages_of(PAGES + sequence * page_stride, begin, begin + num_tiles * TILE, PER_PAGE)
    none = tl.zeros((TILE, PADDED * H), tl.float32)
    # Stages said here: scales are fetched ahead, too, though no product reads them.
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        first = begin + tile * TILE
        if HELD:
            page = page_of(pages, begin, first, PER_PAGE)
        else:
            # A page per entry, though they are all the same: loads through tensors are pipelined, through scalars not.
            page = tl.load(PAGES + sequence * page_stride + (first + inside) // PER_PAGE).to(tl.int64)
        entry = first % PER_PAGE + inside
        pairs = tl.load(CODES + (page * code_stride + entry * (KEY // 2))[:, None] + byte)
        pairs = tl.reshape(pairs, (TILE, 4, 16))
        scales = tl.load(SCALES + page * scale_stride + entry)
        k0, k1, k2, k3 = four(pairs, TILE, 16)
        p = tl.dot(key_bytes(k0, TILE, PTX), q0, none)
        products = (p if FOLDED else p * f0[None, :]) * key_scale(scales, 0)[:, None]
        p = tl.dot(key_bytes(k1, TILE, PTX), q1, none)
        products += (p if FOLDED else p * f1[None, :]) * key_scale(scales, 1)[:, None]
        p = tl.dot(key_bytes(k2, TILE, PTX), q2, none)
        products += (p if FOLDED else p * f2[None, :]) * key_scale(scales, 2)[:, None]
        p = tl.dot(key_bytes(k3, TILE, PTX), q3, none)
        products += (p if FOLDED else p * f3[None, :]) * key_scale(scales, 3)[:, None]
        # Twice the positive part: the addition takes a magnitude for nothing, a maximum has half its rate.
        products = (products + tl.abs(products)) * weight[None, :]
        scores = tl.sum(tl.reshape(products, (TILE, PADDED, H)), axis=2)
        where = SCORES + (sequence * EACH + row)[None, :].to(tl.int64) * score_stride + (first + inside)[:, None]
        tl.store(where, scores, mask=(first + inside)[:, None] < seen[None, :])


@triton.jit
def _index_bytes(
    HEADS, WEIGHTS, CODES, SCALES, PAGES, VISIBLE, SCORES,
    page_stride, code_stride, scale_stride, score_stride,
    EACH: tl.constexpr, PADDED: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """`_index_scores` with products of e4m3: all codes are, times powers of two, which sums of a group are scaled by."""
    after_kernels_before(PDL)
    sequence = tl.program_id(1)
    row = tl.arange(0, PADDED)
    seen = tl.load(VISIBLE + sequence * EACH + row, mask=row < EACH, other=0)
    begin = tl.program_id(0) * (TILE * TILES)
    num_tiles = tl.minimum(tl.cdiv(tl.max(seen, axis=0) - begin, TILE), TILES)
    column = tl.arange(0, PADDED * H)
    used = column < EACH * H
    at = sequence * (EACH * H) + column
    # Keys are 2^-6 of their values, and positive parts are doubled.
    weight = tl.load(WEIGHTS + at, mask=used, other=0.0) * 32.0
    x0, x1 = query_group(HEADS, at, used, 0, KEY), query_group(HEADS, at, used, 1, KEY)
    x2, x3 = query_group(HEADS, at, used, 2, KEY), query_group(HEADS, at, used, 3, KEY)
    m0, m1, m2, m3 = most_of(x0), most_of(x1), most_of(x2), most_of(x3)
    most = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
    exact = tl.min(fits(m0, most) & fits(m1, most) & fits(m2, most) & fits(m3, most), axis=0)
    c0, c1, c2, c3 = query_scale(m0), query_scale(m1), query_scale(m2), query_scale(m3)
    if exact == 1:
        c0 = query_scale(most)
        c1, c2, c3 = c0, c0, c0
        weight = weight * inverse_power(c0)
    q0, q1 = query_bytes(x0, c0, PADDED * H), query_bytes(x1, c1, PADDED * H)
    q2, q3 = query_bytes(x2, c2, PADDED * H), query_bytes(x3, c3, PADDED * H)
    if exact == 1:
        _scan(q0, q1, q2, q3, most, most, most, most, weight,
              CODES, SCALES, PAGES, SCORES, seen, sequence, begin, num_tiles,
              page_stride, code_stride, scale_stride, score_stride,
              EACH, PADDED, H, KEY, PER_PAGE, TILE, STAGES, HELD, True, PTX)  # fmt: skip
    else:
        # Groups of a query that are more than 2^13 apart.
        _scan(q0, q1, q2, q3, inverse_power(c0), inverse_power(c1), inverse_power(c2), inverse_power(c3), weight,
              CODES, SCALES, PAGES, SCORES, seen, sequence, begin, num_tiles,
              page_stride, code_stride, scale_stride, score_stride,
              EACH, PADDED, H, KEY, PER_PAGE, TILE, STAGES, HELD, False, PTX)  # fmt: skip


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
    narrow: bool
    """Multiply in e4m3 and scale sums of groups, instead of in bfloat16."""
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
        narrow=False,
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
    words = shape.narrow or 32 * shape.warps > shape.tile
    codes = key_codes if shape.narrow else key_codes.view(torch.int16)
    scales = key_scales.view(torch.int32) if words else key_scales
    more = {} if shape.registers is None else {"maxnreg": shape.registers}
    if not shape.narrow:
        more |= {"FETCHED": shape.fetched, "WORDS": words, "PARTS": 2 if padded > 4 else 1}
        more["SHIFTS"] = _shifts(heads.device)
    (_index_bytes if shape.narrow else _index_scores)[grid](
        heads, weights, codes, scales, pages, visible, scores,
        pages.stride(0), codes.stride(0), scales.stride(0), scores.stride(0),
        EACH=each, PADDED=padded, H=num_heads, KEY=width, PER_PAGE=per_page, TILE=shape.tile, TILES=shape.tiles,
        STAGES=shape.stages, HELD=held, PDL=shape.pdl, PTX=chip.speaks_ptx(), num_warps=shape.warps,
        num_stages=shape.stages, **more, **options(shape.pdl),
    )  # fmt: skip
