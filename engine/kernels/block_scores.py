# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Index scan inside candidate blocks: every row scores the entries of its own blocks, gathered from paged keys.

As `index_scores`, except that a row's entries come from its list and results lie side by side.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, fp4_quarters, joined_quarters, plane_scale
from engine.kernels.index_scores import query_quarters
from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps


@kernel
def _block_scores(
    HEADS, WEIGHTS, CODES, SCALES, PAGES, VISIBLE, BLOCKS, OUT, page_stride, code_stride, scale_stride, columns,
    H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(1).to(tl.int64)
    at = row * H + tl.arange(0, H)
    group = tl.arange(0, KEY // 32)
    half = tl.arange(0, KEY // 4)[None, :]
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.load(BLOCKS + row * (columns // BLOCK) + column // BLOCK, mask=column < columns, other=-1)
    entry = block * BLOCK + column % BLOCK
    valid = (block >= 0) & (entry < tl.load(VISIBLE + row))
    entry = tl.where(valid, entry, 0)
    page = tl.load(PAGES + row * page_stride + entry // PER_PAGE, mask=valid, other=0).to(tl.int64)
    inside = entry % PER_PAGE
    codes = tl.reshape(tl.load(CODES + (page * code_stride + inside * (KEY // 4))[:, None] + half), (TILE, 4, 8))
    scales = tl.load(SCALES + (page * scale_stride + inside * 4)[:, None] + group[None, :])
    # Queries are asked for while keys are on their way.
    queries = tl.trans(query_quarters(HEADS, at, at >= 0, H, KEY))
    weight = tl.load(WEIGHTS + at) * UNPLANED
    keys = fp4_quarters(codes, tl.broadcast_to(tl.expand_dims(plane_scale(scales), 2), (TILE, 4, 8)), PTX)
    products = tl.dot(joined_quarters(keys, TILE), queries)
    scores = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1)
    tl.store(OUT + row * columns + column, tl.where(valid, scores, float("-inf")), mask=column < columns)


class Shape(NamedTuple):
    """What a launch chooses."""

    tile: int
    """Entries of a row, a program."""
    warps: int
    pdl: bool


def shape_of() -> Shape:
    """Return the shape."""
    return Shape(tile=128, warps=4, pdl=overlaps())


def block_scores(
    heads: torch.Tensor,
    weights: torch.Tensor,
    key_codes: torch.Tensor,
    key_scales: torch.Tensor,
    pages: torch.Tensor,
    visible: torch.Tensor,
    blocks: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """Return float32 [t, n block]: scores of the entries of each row's n blocks, -inf for those it has not or sees not.

    `heads` bfloat16 [t, h, w] (values of the index format), `weights` float32 [t, h]; `key_codes`, `key_scales` as
    `index_scores` reads them, w = 128; `pages` int32 or int64 [t, p] of each row's sequence; `visible` int32 [t];
    `blocks` int32 [t, n] numbers of blocks of `block` entries each, -1: none. Products are exact, sums float32.
    """
    rows, num_heads, width = heads.shape
    columns = blocks.shape[1] * block
    made = torch.empty(rows, columns, dtype=torch.float32, device=heads.device)
    halves = key_codes.view(torch.int16)
    if rows:
        shape = shape_of()
        _block_scores[(cdiv(columns, shape.tile), rows)](
            heads, weights, halves, key_scales, pages, visible, blocks, made,
            pages.stride(0), halves.stride(0), key_scales.stride(0), columns,
            H=num_heads, KEY=width, PER_PAGE=key_codes.shape[1], BLOCK=block, TILE=shape.tile,
            PDL=shape.pdl, PTX=chip.speaks_ptx(), num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return made
