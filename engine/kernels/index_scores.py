# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Index scan: scores of all visible entries from their paged four-bit keys; rows of one sequence share the reading.

Entries are the rows of the matrix product, so that unpacked keys need not leave registers, and heads its columns.
"""

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, eight, fp4_planes, plane_scale

_TILE = 128
"""Entries at a time."""
_PROGRAMS = 528
"""Programs that a GPU of 132 multiprocessors holds: longer runs of tiles share one loading of the queries."""


@triton.jit
def _index_scores(
    HEADS, WEIGHTS, CODES, SCALES, PAGES, VISIBLE, SCORES,
    page_stride, code_stride, scale_stride, score_stride,
    EACH: tl.constexpr, PADDED: tl.constexpr, H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, PTX: tl.constexpr,
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
    for tile in tl.range(0, num_tiles):
        first = begin + tile * TILE
        # A page per entry, though they are all the same: loads through tensors are pipelined, through scalars not.
        page = tl.load(PAGES + sequence * page_stride + (first + inside) // PER_PAGE)
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
    all_tiles = triton.cdiv(pages.shape[1] * per_page, _TILE)
    # A score does not depend on how many tiles a program has.
    tiles = max(4, min(32, triton.next_power_of_2(all_tiles * len(pages) // _PROGRAMS)))
    grid = (triton.cdiv(all_tiles, tiles), len(pages))
    words = key_codes.view(torch.int32)
    _index_scores[grid](
        heads, weights, words, key_scales, pages, visible, scores,
        pages.stride(0), words.stride(0), key_scales.stride(0), scores.stride(0),
        EACH=each, PADDED=padded, H=num_heads, KEY=width, PER_PAGE=per_page, TILE=_TILE, TILES=tiles, PTX=chip.speaks_ptx(),
        num_warps=4 if padded <= 2 else 8, num_stages=5,
    )  # fmt: skip
