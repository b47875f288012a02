# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Collapse streams that no sublayer has just written, normalise and quantize: the second half of `mix_streams`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.device import q8_code
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses. One shape for all numbers of rows: the order of the norm's sum depends on it."""

    chunk: int
    """Columns at a time; a program has a row."""
    warps: int
    pdl: bool


def shape_of(width: int) -> Shape:
    """Return the shape for streams of a width."""
    chunk = min(1024, triton.next_power_of_2(width))
    return Shape(chunk, max(1, chunk // 128), pdl=overlaps())


@triton.jit
def _collapse_streams(
    X, PRE, W, NORMED, CODES, SCALES, eps, D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((CHUNK,), tl.float32)
    held = ()
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        collapsed = tl.zeros((CHUNK,), tl.float32)
        for k in tl.static_range(4):
            x = tl.load(X + (row * 4 + k) * D + at, mask=at < D, other=0.0).to(tl.float32)
            collapsed += tl.load(PRE + row * 4 + k) * x
        rounded = collapsed.to(tl.bfloat16)
        squares += rounded.to(tl.float32) * rounded.to(tl.float32)
        held += (rounded,)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        weight = tl.load(W + at, mask=at < D, other=0.0)
        normed = (weight * (held[start // CHUNK].to(tl.float32) * scale)).to(tl.bfloat16)
        tl.store(NORMED + row * D + at, normed, mask=at < D)
        codes, scales = q8_code(tl.reshape(normed.to(tl.float32), (CHUNK // 32, 32)))
        tl.store(CODES + row * D + at, tl.reshape(codes, (CHUNK,)), mask=at < D)
        group = start // 32 + tl.arange(0, CHUNK // 32)
        tl.store(SCALES + row * (D // 32) + group, scales.to(tl.uint8), mask=group < D // 32)


def collapse_streams(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return normed bfloat16 [t, d], its e4m3 codes uint8 [t, d] and e8m0 scales uint8 [t, d / 32].

    `streams` bfloat16 [t, hc, d]; float32 `pre` [t, hc], `weight` [d]; contiguous, hc = 4, d a multiple of 32. Products
    and sums are not fused.
    """
    rows, num_streams, width = streams.shape
    assert num_streams == 4
    normed = torch.empty(rows, width, dtype=torch.bfloat16, device=streams.device)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=streams.device)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, device=streams.device)
    shape = shape_of(width)
    _collapse_streams[(rows,)](
        streams, pre, weight, normed, codes, scales, eps, D=width, CHUNK=shape.chunk, PDL=shape.pdl,
        num_warps=shape.warps, enable_fp_fusion=False, **options(shape.pdl),
    )  # fmt: skip
    return normed, codes, scales
