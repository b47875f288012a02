# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Index scan inside candidate blocks: every row scores the entries of its own blocks, gathered from paged keys.

As `index_scores`, except that a row's entries come from its list and results lie side by side.
"""

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, eight, fp4_planes, plane_scale

_TILE = 128
"""Entries at a time."""


@triton.jit
def _block_scores(
    HEADS, WEIGHTS, CODES, SCALES, PAGES, VISIBLE, BLOCKS, OUT, page_stride, code_stride, scale_stride, columns,
    H: tl.constexpr, KEY: tl.constexpr, PER_PAGE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, H)
    group = tl.arange(0, KEY // 32)
    word = group[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    whole = (row * H + head)[:, None, None] * KEY
    whole = whole + tl.arange(0, KEY // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    queries = eight(tl.load(HEADS + whole), H, KEY // 8)
    weight = tl.load(WEIGHTS + row * H + head)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.load(BLOCKS + row * (columns // BLOCK) + column // BLOCK, mask=column < columns, other=-1)
    entry = block * BLOCK + column % BLOCK
    valid = (block >= 0) & (entry < tl.load(VISIBLE + row))
    entry = tl.where(valid, entry, 0)
    page = tl.load(PAGES + row * page_stride + entry // PER_PAGE, mask=valid, other=0).to(tl.int64)
    inside = entry % PER_PAGE
    codes = tl.load(CODES + (page * code_stride + inside * (KEY // 8))[:, None, None] + word)
    scales = tl.load(SCALES + (page * scale_stride + inside * 4)[:, None] + group[None, :])
    keys = fp4_planes(codes, tl.broadcast_to(tl.expand_dims(plane_scale(scales), 2), (TILE, 4, 4)), PTX)
    products = tl.zeros((TILE, H), tl.float32)
    for n in tl.static_range(8):
        products = tl.dot(tl.reshape(keys[n], (TILE, KEY // 8)), tl.trans(queries[n]), products)
    scores = tl.sum(tl.maximum(products, 0.0) * (weight * UNPLANED)[None, :], axis=1)
    tl.store(OUT + row * columns + column, tl.where(valid, scores, float("-inf")), mask=column < columns)


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
    words = key_codes.view(torch.int32)
    if rows:
        _block_scores[(triton.cdiv(columns, _TILE), rows)](
            heads, weights, words, key_scales, pages, visible, blocks, made,
            pages.stride(0), words.stride(0), key_scales.stride(0), columns,
            H=num_heads, KEY=width, PER_PAGE=key_codes.shape[1], BLOCK=block, TILE=_TILE, PTX=chip.speaks_ptx(),
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return made
