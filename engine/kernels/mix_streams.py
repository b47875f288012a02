# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""Mega mHC: expand a sublayer's output over the residual streams, collapse them with coefficients that are already
known, normalise and quantize the next sublayer's input; every byte is read and written once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.device import store_normed
from engine.kernels.launch import kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses. One shape for all numbers of rows: the order of the norm's sum depends on it."""

    chunk: int
    """Columns at a time; a program has a row."""
    warps: int
    pdl: bool


def shape_of(width: int) -> Shape:
    """Return the shape for streams of a width."""
    chunk = 1024 if width > 1024 else min(512, next_power_of_2(width))
    return Shape(chunk, max(1, chunk // 128), pdl=overlaps())


@kernel
def _mix_streams(
    Y, PAIRS, X, POST, COMB, PRE, W, MADE, NORMED, CODES, SCALES, eps, D: tl.constexpr, K: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    weights = ()
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        weights += (tl.load(W + at, mask=at < D, other=0.0),)
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    pre = _four(PRE + row * 4)
    post = _four(POST + row * 4)
    comb = (_four(COMB + row * 16), _four(COMB + row * 16 + 4), _four(COMB + row * 16 + 8), _four(COMB + row * 16 + 12))
    # All reads come before the first write, which they would have to wait behind.
    given = ()
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < D
        old = X + row * (4 * D) + at
        y = tl.load(Y + row * D + at, mask=inside, other=0.0)
        if K > 0:
            total = y.to(tl.float32)
            for k in tl.static_range(K):
                total += tl.load(PAIRS + (row * K + k) * D + at, mask=inside, other=0.0).to(tl.float32)
            y = total.to(tl.bfloat16)
        x0 = tl.load(old, mask=inside, other=0.0)
        x1 = tl.load(old + D, mask=inside, other=0.0)
        x2 = tl.load(old + 2 * D, mask=inside, other=0.0)
        x3 = tl.load(old + 3 * D, mask=inside, other=0.0)
        given += ((y, x0, x1, x2, x3),)
    squares = tl.zeros((CHUNK,), tl.float32)
    held = ()
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < D
        y, x0, x1, x2, x3 = given[start // CHUNK]
        y = y.to(tl.float32)
        x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        collapsed = tl.zeros((CHUNK,), tl.float32)
        for k in tl.static_range(4):
            mixed = post[k] * y + comb[0][k] * x0
            mixed = mixed + comb[1][k] * x1 + comb[2][k] * x2 + comb[3][k] * x3
            made = mixed.to(tl.bfloat16)
            tl.store(MADE + row * (4 * D) + k * D + at, made, mask=inside)
            collapsed += pre[k] * made.to(tl.float32)
        rounded = collapsed.to(tl.bfloat16)
        squares += rounded.to(tl.float32) * rounded.to(tl.float32)
        held += (rounded,)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
    for start in tl.static_range(0, D, CHUNK):
        collapsed = held[start // CHUNK].to(tl.float32)
        normed = (weights[start // CHUNK] * (collapsed * scale)).to(tl.bfloat16)
        store_normed(normed, NORMED, CODES, SCALES, row, start, D, CHUNK)


@triton.jit
def _four(at):
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


def mix_streams(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    pairs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return new streams bfloat16 [t, hc, d], normed bfloat16 [t, d], its e4m3 codes [t, d] and scales [t, d / 32].

    `y` bfloat16 [t, d]; `streams` bfloat16 [t, hc, d]; float32 `post`, `pre` [t, hc], `comb` [t, hc (from), hc (to)];
    `weight` float32 [d]; all contiguous, hc = 4, d a multiple of 32. New streams are equal to the reference bit by bit: products
    and sums are not fused. The collapse reads them as they are stored. With `pairs` bfloat16 [t k, d], the results of a
    row's k experts, y is its sum with them, one after the other in float32, rounded to bfloat16.
    """
    rows, num_streams, width = streams.shape
    assert num_streams == 4
    made, normed = torch.empty_like(streams), torch.empty_like(y)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=y.device)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, device=y.device)
    shape = shape_of(width)
    _mix_streams[(rows,)](
        y, y if pairs is None else pairs, streams, post, comb, pre, weight, made, normed, codes, scales, eps, D=width,
        K=0 if pairs is None else len(pairs) // rows, CHUNK=shape.chunk, PDL=shape.pdl, num_warps=shape.warps, enable_fp_fusion=False, **options(shape.pdl),
    )  # fmt: skip
    return made, normed, codes, scales
