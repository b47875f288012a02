# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Linears whose weights are kept in bfloat16 and whose results are used in float32: gates, compressors, the head.

Where the tiles of a product are too few for a device, its columns are cut into parts that programs sum side by side; a
second kernel adds the parts, first to last. Programs that make several parts add them in the same order.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps

_PROGRAMS = 132
"""Weights are cut into tiles as high as leaves so many of them, one a multiprocessor."""
_FIXED_TILE = 32
_HIGH, _MOST_PARTS = 512, 20
"""Rows of weights from which tiles are high though they are few; parts whose merging takes no longer than they save."""
_MERGED = 128
"""Results that a program of the second kernel adds."""
_VENDOR_ROWS, _VENDOR_OUT = 128, 256
"""From so many rows, and rows of weights, the vendor's product is faster (H200, 256 x 129280 x 5120: 564 and 894 us; 8192 x
384 x 5120: 46 and 92). What it adds in which order depends on the rows, so `fixed` does without."""


class Shape(NamedTuple):
    """What a launch chooses."""

    height: int
    """Rows of weights a program takes, `tile` rows of x, `step` columns at a time."""
    tile: int
    step: int
    parts: int
    """Parts of the columns, summed apart."""
    each: int
    """Parts that one program makes."""
    warps: int
    stages: int
    rows_first: bool
    """Neighbouring programs share weights, not rows of x: what is larger is then read once."""
    pdl: bool


def shape_of(rows: int, out: int, inner: int, *, fixed: bool) -> Shape:
    """Return the shape for [rows, inner] x [out, inner]; with `fixed` only `each` depends on rows."""
    tile = _FIXED_TILE if fixed else max(16, min(128, next_power_of_2(rows)))
    tiles = 1 if fixed else cdiv(rows, tile)
    height = next((h for h in (64, 32) if cdiv(out, h) * tiles >= _PROGRAMS), 64 if out >= _HIGH else 16)
    step = 128 if inner % 128 == 0 and tile <= 32 else 64 if inner % 64 == 0 else 32
    made = cdiv(out, height) * tiles
    parts = 1 if made >= _PROGRAMS else min(cdiv(inner, step), _MOST_PARTS, max(1, 2 * _PROGRAMS // made))
    is_full = fixed and cdiv(rows, tile) >= parts
    warps = 2 if height == 16 and tile <= _FIXED_TILE else 4
    each = parts if is_full else 1
    return Shape(height, tile, step, parts, each, warps, 4, rows_first=out > rows, pdl=overlaps())


@kernel
def _plain_linear(
    X, W, OUT, count, K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    PART: tl.constexpr, EACH: tl.constexpr, ROWS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1 if ROWS_FIRST else 0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(0 if ROWS_FIRST else 1) * TILE + tl.arange(0, TILE)
    group = tl.program_id(2)
    here, exists = n < N, row < count
    weight = W + n.to(tl.int64)[:, None] * K
    x = X + row.to(tl.int64)[None, :] * K
    after_kernels_before(PDL)
    total = tl.zeros((ROWS, TILE), tl.float32)
    done = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(group * (PART * EACH), tl.minimum((group + 1) * (PART * EACH), K), STEP):
        k = start + tl.arange(0, STEP)
        left = tl.load(weight + k[None, :], mask=here[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(x + k[:, None], mask=exists[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(left, right, total)
        if EACH > 1:
            is_last = (start + STEP) % PART == 0
            done = tl.where(is_last, done + total, done)
            total = tl.where(is_last, 0.0, total)
    out = OUT + (group * count + row).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, tl.trans(done + total), mask=exists[:, None] & here[None, :])


@kernel
def _merge_parts(PARTIAL, OUT, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (tl.load(PARTIAL + part * count + at, mask=inside, other=0.0),)
    total = parts[0]
    for part in tl.static_range(1, PARTS):
        total += parts[part]
    tl.store(OUT + at, total, mask=inside)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, *, fixed: bool = False) -> torch.Tensor:
    """Return float32 [t, n] = x W^T.

    `x` bfloat16 [t, k], `weight` bfloat16 [n, k], both contiguous. Products are exact, sums float32 along k. `fixed`:
    tiles and parts do not depend on t, so that a row's bits depend on the row alone.
    """
    rows, inner = x.shape
    out = len(weight)
    if x.is_cuda and not fixed and rows >= _VENDOR_ROWS and out >= _VENDOR_OUT:
        return torch.mm(x, weight.mT, out_dtype=torch.float32)
    made = torch.empty(rows, out, dtype=torch.float32, device=x.device)
    if not rows:
        return made
    shape = shape_of(rows, out, inner, fixed=fixed)
    part = cdiv(cdiv(inner, shape.parts), shape.step) * shape.step
    groups = cdiv(inner, part * shape.each)
    summed = made if groups == 1 else torch.empty(groups, rows, out, dtype=torch.float32, device=x.device)
    tiles = cdiv(out, shape.height), cdiv(rows, shape.tile)
    _plain_linear[(*(reversed(tiles) if shape.rows_first else tiles), groups)](
        x, weight, summed, rows, K=inner, N=out, ROWS=shape.height, TILE=shape.tile, STEP=shape.step, PART=part,
        EACH=shape.each, ROWS_FIRST=shape.rows_first, PDL=shape.pdl, num_warps=shape.warps,
        num_stages=shape.stages, **options(shape.pdl),
    )  # fmt: skip
    if groups > 1:
        _merge_parts[(cdiv(rows * out, _MERGED),)](
            summed, made, rows * out, PARTS=groups, BLOCK=_MERGED, PDL=shape.pdl, num_warps=1, **options(shape.pdl)
        )
    return made
