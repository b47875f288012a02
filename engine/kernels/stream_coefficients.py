# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Mixing coefficients of the residual streams: a skinny product with its mean square, split over K, then Sinkhorn.

float32 weights come as three bfloat16 parts, whose sum is exact; the streams are bfloat16: so three matrix products with
float32 sums are the float32 product, and they are one product whose columns are the three parts' side by side.

A row's bits depend on the row alone: K is cut into steps, whose products start from zero and are added in an order that
is written down. Few rows make a program of every step, many rows one of a group of steps. Products and sums outside of
matrix products are not fused: where a compiler fuses depends on the shape.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps

_COLUMNS = tl.constexpr(32)
"""Results per row, padded: pre, post, comb, and behind them the sum of squares."""
_GROUPS, _FEW_GROUPS, _STEP = 32, 8, 128
"""Few where the streams of a tiny model are too narrow for more."""


class Shape(NamedTuple):
    """What the two launches choose."""

    tile: int
    """Rows a program of the product takes."""
    each: int
    """Steps it takes: one, or all of its group."""
    warps: int
    stages: int
    finish_warps: int
    """Of the second kernel, whose program has a row."""
    pdl: bool


def shape_of(rows: int, steps: int) -> Shape:
    """Return the shape for so many rows and steps in a group; no order of additions depends on it."""
    # Many rows are not pipelined: it was slower, and triton 3.6 was seen to reuse a buffer of a pipeline too early.
    each = 1 if rows <= 512 else steps
    # Below some two rows a multiprocessor, what one row waits for is all there is: its parts are read by more threads.
    return Shape(64, each, 4, 1, 4 if rows < 256 and steps > each else 1, pdl=overlaps())


@kernel
def _partial(
    X, FN, PARTIAL, count, K: tl.constexpr, OUT: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, HALVINGS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    group = tl.program_id(1)
    exists = row < count
    three = tl.arange(0, 4 * _COLUMNS)
    column = three % _COLUMNS
    used = (three < 3 * _COLUMNS) & (column < OUT)
    weight = FN + (three // _COLUMNS * OUT + column) * K
    first = group * (EACH * STEP) + tl.arange(0, STEP)
    if EACH == 1:
        weights = tl.load(weight[None, :] + first[:, None], mask=used[None, :], other=0.0)
    after_kernels_before(PDL)
    total = tl.zeros((TILE, _COLUMNS), tl.float32)
    squares = tl.zeros((TILE,), tl.float32)
    for step in tl.range(0, EACH, num_stages=STAGES):
        at = first + step * STEP
        x = tl.load(X + row[:, None].to(tl.int64) * K + at, mask=exists[:, None], other=0.0)
        if EACH > 1:
            weights = tl.load(weight[None, :] + at[:, None], mask=used[None, :], other=0.0)
        product = tl.dot(x, weights)
        product = tl.sum(tl.reshape(product, (TILE, 2, 2, _COLUMNS)), axis=1)
        total += tl.sum(product, axis=1)
        wide = x.to(tl.float32)
        squares += _summed(wide * wide, TILE, HALVINGS)
    place = (group * count + row)[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)
    total = tl.where(tl.arange(0, _COLUMNS)[None, :] == OUT, squares[:, None], total)
    tl.store(PARTIAL + place, total, mask=exists[:, None])


@triton.jit
def _summed(x, ROWS: tl.constexpr, HALVINGS: tl.constexpr):
    """Return [ROWS] of [ROWS, 2^HALVINGS], neighbours first: sums of two are the same in every layout, of more not."""
    for _ in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (ROWS, x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def _added(x, HALVINGS: tl.constexpr):
    """Return [1, _COLUMNS] of [2^HALVINGS, 1, _COLUMNS], halves first, see `_summed`."""
    for _ in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, 1, _COLUMNS)), axis=0)
    return tl.reshape(x, (1, _COLUMNS))


@triton.jit
def _inverse(x, PTX: tl.constexpr):
    """Return 1 / x of positive normal values, to the last bit or two."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _normalised(a, b, c, d, eps, PTX: tl.constexpr):
    inverse = _inverse((a + b) + (c + d) + eps, PTX)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _softmax(a, b, c, d, eps, PTX: tl.constexpr):
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    a, b, c, d = _normalised(a, b, c, d, 0.0, PTX)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _four(x, column, first):
    """Return columns `first` .. of [1, _COLUMNS], each [1]: one value and zeros have one sum."""
    a = tl.sum(tl.where(column == first, x, 0.0), axis=1)
    b = tl.sum(tl.where(column == first + 1, x, 0.0), axis=1)
    c = tl.sum(tl.where(column == first + 2, x, 0.0), axis=1)
    d = tl.sum(tl.where(column == first + 3, x, 0.0), axis=1)
    return a, b, c, d


@triton.jit
def _put(cell, first, x, a, b, c, d):
    """Return x [1, 16] with four columns replaced: the inverse of `_four`."""
    x = tl.where(cell == first, a[:, None], x)
    x = tl.where(cell == first + 1, b[:, None], x)
    x = tl.where(cell == first + 2, c[:, None], x)
    return tl.where(cell == first + 3, d[:, None], x)


@kernel
def _finish(
    PARTIAL, SCALE, BASE, PRE, POST, COMB, norm_eps, eps, count, K: tl.constexpr, OUT: tl.constexpr,
    GROUPS: tl.constexpr, HALVINGS: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, _COLUMNS)[None, :]
    kind = tl.where(column < 4, 0, tl.where(column < 8, 1, 2))
    scale = tl.load(SCALE + kind)
    base = tl.load(BASE + column, mask=column < OUT, other=0.0)
    after_kernels_before(PDL)
    # Steps of a group lie behind one another, or are summed already; the same order of additions either way.
    group = tl.arange(0, GROUPS)[:, None, None]
    place = (group * (PARTS * count) + row[None, :, None]) * _COLUMNS + column[None, :, :]
    parts = ()
    for step in tl.static_range(PARTS):
        parts += (tl.load(PARTIAL + step * count * _COLUMNS + place),)
    total = parts[0]
    for step in tl.static_range(1, PARTS):
        total += parts[step]
    value = _added(total, HALVINGS)
    squares = tl.sum(tl.where(column == OUT, value, 0.0), axis=1)
    value = value * tl.rsqrt(squares / K + norm_eps)[:, None] * scale + base
    gate = tl.sigmoid(value)
    tl.store(PRE + row[:, None] * 4 + column, gate + eps, mask=column < 4)
    tl.store(POST + row[:, None] * 4 + column - 4, 2.0 * gate, mask=(column >= 4) & (column < 8))
    # The sixteen numbers of a row are in one thread from here: sums across threads are what rounds would wait for.
    a0, a1, a2, a3 = _four(value, column, 8)
    b0, b1, b2, b3 = _four(value, column, 12)
    c0, c1, c2, c3 = _four(value, column, 16)
    d0, d1, d2, d3 = _four(value, column, 20)
    a0, a1, a2, a3 = _softmax(a0, a1, a2, a3, eps, PTX)
    b0, b1, b2, b3 = _softmax(b0, b1, b2, b3, eps, PTX)
    c0, c1, c2, c3 = _softmax(c0, c1, c2, c3, eps, PTX)
    d0, d1, d2, d3 = _softmax(d0, d1, d2, d3, eps, PTX)
    for i in tl.range(20):
        if i > 0:
            a0, a1, a2, a3 = _normalised(a0, a1, a2, a3, eps, PTX)
            b0, b1, b2, b3 = _normalised(b0, b1, b2, b3, eps, PTX)
            c0, c1, c2, c3 = _normalised(c0, c1, c2, c3, eps, PTX)
            d0, d1, d2, d3 = _normalised(d0, d1, d2, d3, eps, PTX)
        a0, b0, c0, d0 = _normalised(a0, b0, c0, d0, eps, PTX)
        a1, b1, c1, d1 = _normalised(a1, b1, c1, d1, eps, PTX)
        a2, b2, c2, d2 = _normalised(a2, b2, c2, d2, eps, PTX)
        a3, b3, c3, d3 = _normalised(a3, b3, c3, d3, eps, PTX)
    cell = tl.arange(0, 16)[None, :]
    comb = tl.zeros((1, 16), tl.float32)
    comb = _put(cell, 0, comb, a0, a1, a2, a3)
    comb = _put(cell, 4, comb, b0, b1, b2, b3)
    comb = _put(cell, 8, comb, c0, c1, c2, c3)
    comb = _put(cell, 12, comb, d0, d1, d2, d3)
    tl.store(COMB + row[:, None] * 16 + cell, comb)


def stream_coefficients(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float32 pre [t, hc], post [t, hc], comb [t, hc (from), hc (to)].

    `streams` bfloat16 [t, hc, d]; `fn` bfloat16 [3, 2 hc + hc^2, hc d], the weight as `reference.formats.thirds` cuts
    it; float32 `scale` [3], `base` [2 hc + hc^2]; contiguous, hc = 4, hc d a multiple of 64 * 8.
    """
    rows, hc, width = streams.shape
    inner = hc * width
    assert hc == 4
    step = next(s for s in (_STEP, _STEP // 2) if inner % (s * _FEW_GROUPS) == 0)
    groups = _GROUPS if inner % (step * _GROUPS) == 0 else _FEW_GROUPS
    steps = inner // (step * groups)
    shape = shape_of(rows, steps)
    device = streams.device
    partial = torch.empty(groups * steps // shape.each, rows, _COLUMNS.value, dtype=torch.float32, device=device)
    pre, post = (torch.empty(rows, hc, dtype=torch.float32, device=device) for _ in range(2))
    comb = torch.empty(rows, hc, hc, dtype=torch.float32, device=device)
    _partial[(cdiv(rows, shape.tile), len(partial))](
        streams, fn, partial, rows, K=inner, OUT=fn.shape[1], EACH=shape.each, TILE=shape.tile, STEP=step,
        HALVINGS=step.bit_length() - 1, STAGES=shape.stages, PDL=shape.pdl, num_warps=shape.warps, enable_fp_fusion=False, **options(shape.pdl),
    )  # fmt: skip
    _finish[(rows,)](
        partial, scale, base, pre, post, comb, norm_eps, eps, rows, K=inner, OUT=fn.shape[1], GROUPS=groups,
        HALVINGS=groups.bit_length() - 1, PARTS=steps // shape.each, PTX=chip.speaks_ptx(), PDL=shape.pdl,
        num_warps=shape.finish_warps, enable_fp_fusion=False, **options(shape.pdl),
    )  # fmt: skip
    return pre, post, comb
