# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Index scan: scores of all visible entries from their paged four-bit keys; rows of one sequence share the reading.

Entries are the rows of the matrix product, so that unpacked keys need not leave registers, and heads its columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, eight, fp4_bytes, fp4_planes, inverse_power, plane_scale, power

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
    """Return float32 [columns, 32]: group g of queries, even elements first, as `fp4_bytes` takes keys apart."""
    slot = tl.arange(0, 32)
    place = at[:, None] * KEY + (g * 32 + slot % 16 * 2 + slot // 16)[None, :]
    return tl.load(HEADS + place, mask=used[:, None], other=0.0).to(tl.float32)


@triton.jit
def query_scale(most):
    """Return int32 codes of powers of two that bring a magnitude of `most` to 2^8, the highest exponent of e4m3."""
    return 262 - tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 9)


@triton.jit
def query_bytes(x, code):
    """Return e4m3 [32, columns] of queries [columns, 32] times 2^(code - 127), and whether all are exact."""
    wide = x * power(code)[:, None]
    narrow = wide.to(tl.float8e4nv)
    exact = tl.min(tl.min((narrow.to(tl.float32) == wide).to(tl.int32), axis=1), axis=0)
    return tl.trans(narrow), exact


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
    group = tl.arange(0, 4)
    byte = group[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    held = tl.arange(0, 32)
    if HELD:
        place = begin // PER_PAGE + held
        pages = tl.load(
            PAGES + sequence * page_stride + place, mask=place * PER_PAGE < begin + num_tiles * TILE, other=0
        )
    none = tl.zeros((TILE, PADDED * H), tl.float32)
    # Stages said here: scales are fetched ahead, too, though no product reads them.
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        first = begin + tile * TILE
        if HELD:
            page = tl.sum(tl.where(held == first // PER_PAGE - begin // PER_PAGE, pages, 0), axis=0).to(tl.int64)
        else:
            # A page per entry, though they are all the same: loads through tensors are pipelined, through scalars not.
            page = tl.load(PAGES + sequence * page_stride + (first + inside) // PER_PAGE).to(tl.int64)
        entry = first % PER_PAGE + inside
        pairs = tl.load(CODES + (page * code_stride + entry * (KEY // 2))[:, None, None] + byte)
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
    TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`_index_scores` with products of e4m3: all codes are, times powers of two, which sums of a group are scaled by."""
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
    m0, m1 = tl.max(tl.abs(x0), axis=1), tl.max(tl.abs(x1), axis=1)
    m2, m3 = tl.max(tl.abs(x2), axis=1), tl.max(tl.abs(x3), axis=1)
    code = query_scale(tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)))
    q0, e0 = query_bytes(x0, code)
    q1, e1 = query_bytes(x1, code)
    q2, e2 = query_bytes(x2, code)
    q3, e3 = query_bytes(x3, code)
    if e0 + e1 + e2 + e3 == 4:
        f = inverse_power(code)
        _scan(q0, q1, q2, q3, f, f, f, f, weight * f, CODES, SCALES, PAGES, SCORES, seen, sequence, begin, num_tiles,
              page_stride, code_stride, scale_stride, score_stride,
              EACH, PADDED, H, KEY, PER_PAGE, TILE, STAGES, HELD, True, PTX)  # fmt: skip
    else:
        # Groups of a query that are more than 2^14 apart.
        c0, c1, c2, c3 = query_scale(m0), query_scale(m1), query_scale(m2), query_scale(m3)
        q0, e0 = query_bytes(x0, c0)
        q1, e1 = query_bytes(x1, c1)
        q2, e2 = query_bytes(x2, c2)
        q3, e3 = query_bytes(x3, c3)
        _scan(q0, q1, q2, q3, inverse_power(c0), inverse_power(c1), inverse_power(c2), inverse_power(c3), weight,
              CODES, SCALES, PAGES, SCORES, seen, sequence, begin, num_tiles,
              page_stride, code_stride, scale_stride, score_stride,
              EACH, PADDED, H, KEY, PER_PAGE, TILE, STAGES, HELD, False, PTX)  # fmt: skip


@triton.jit
def _index_scores(
    HEADS, WEIGHTS, CODES, SCALES, PAGES, VISIBLE, SCORES,
    page_stride, code_stride, scale_stride, score_stride,
    EACH: tl.constexpr, PADDED: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    sequence = tl.program_id(1)
    row = tl.arange(0, PADDED)
    seen = tl.load(VISIBLE + sequence * EACH + row, mask=row < EACH, other=0)
    begin = block * (TILE * TILES)
    num_tiles = tl.minimum(tl.cdiv(tl.max(seen, axis=0) - begin, TILE), TILES)
    column = tl.arange(0, PADDED * H)
    used = column < EACH * H
    at = sequence * (EACH * H) + column
    weight = tl.load(WEIGHTS + at, mask=used, other=0.0)
    inside = tl.arange(0, TILE)
    group = tl.arange(0, KEY // 32)
    word = group[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    whole = at[:, None, None] * KEY + tl.arange(0, KEY // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    queries = eight(tl.load(HEADS + whole, mask=used[:, None, None], other=0.0), PADDED * H, KEY // 8)
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        first = begin + tile * TILE
        # A page per entry, though they are all the same: loads through tensors are pipelined, through scalars not.
        page = tl.load(PAGES + sequence * page_stride + (first + inside) // PER_PAGE).to(tl.int64)
        entry = (first + inside) % PER_PAGE
        codes = tl.load(CODES + (page * code_stride + entry * (KEY // 8))[:, None, None] + word)
        scales = tl.load(SCALES + (page * scale_stride + entry * 4)[:, None] + group[None, :])
        keys = fp4_planes(codes, tl.broadcast_to(tl.expand_dims(plane_scale(scales), 2), (TILE, 4, 4)), PTX)
        products = tl.zeros((TILE, PADDED * H), tl.float32)
        for n in tl.static_range(8):
            products = tl.dot(tl.reshape(keys[n], (TILE, KEY // 8)), tl.trans(queries[n]), products)
        products = tl.maximum(products, 0.0) * (weight * UNPLANED)[None, :]
        scores = tl.sum(tl.reshape(products, (TILE, PADDED, H)), axis=2)
        where = SCORES + (sequence * EACH + row)[None, :].to(tl.int64) * score_stride + (first + inside)[:, None]
        tl.store(where, scores, mask=(first + inside)[:, None] < seen[None, :])


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
    registers: int | None
    """The most a thread may have."""
    held: bool
    """Load a program's page numbers (of 32 tiles at most) once; only if `narrow`."""


def shape_of(sequences: int, entries: int, padded: int) -> Shape:
    """Return how `entries` of each of `sequences` are scanned by `padded` rows; no score depends on it."""
    tile = 128
    each = triton.cdiv(entries, tile) * sequences // _PROGRAMS
    return Shape(
        tile=tile,
        tiles=max(4, min(32, triton.next_power_of_2(each))),
        warps=4 if padded <= 2 else 8,
        stages=5,
        narrow=False,
        held=False,
        registers=None,
    )


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
    codes, scales = key_codes, key_scales
    if shape.narrow:
        scales = scales.view(torch.int32)
    else:
        codes = codes.view(torch.int32)
    kernel, more = (_index_bytes, {"HELD": shape.held}) if shape.narrow else (_index_scores, {})
    if shape.registers is not None:
        more["maxnreg"] = shape.registers
    kernel[grid](
        heads, weights, codes, scales, pages, visible, scores,
        pages.stride(0), codes.stride(0), scales.stride(0), scores.stride(0),
        EACH=each, PADDED=padded, H=num_heads, KEY=width, PER_PAGE=per_page, TILE=shape.tile, TILES=shape.tiles,
        STAGES=shape.stages, PTX=chip.speaks_ptx(), num_warps=shape.warps, num_stages=shape.stages, **more,
    )  # fmt: skip
