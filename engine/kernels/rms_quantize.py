# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Root-mean-square norm and quantization to e4m3 in groups of 32, in one pass over memory."""

from typing import NamedTuple

import torch
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
    """Return the shape for rows of a width."""
    chunk = min(1024 if width > 2048 else 512, next_power_of_2(width))
    return Shape(chunk, max(1, min(4, chunk // 128)), pdl=overlaps())


@kernel
def _rms_quantize(
    X, W, Y, CODES, SCALES, eps, stride, D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    weights = ()
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        weights += (tl.load(W + at, mask=at < D, other=0.0),)
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((CHUNK,), tl.float32)
    held = ()
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(X + row * stride + at, mask=at < D, other=0.0)
        squares += x.to(tl.float32) * x.to(tl.float32)
        held += (x,)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
    for start in tl.static_range(0, D, CHUNK):
        y = (weights[start // CHUNK] * (held[start // CHUNK].to(tl.float32) * scale)).to(tl.bfloat16)
        store_normed(y, Y, CODES, SCALES, row, start, D, CHUNK)


def rms_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y bfloat16 [t, d], its e4m3 codes uint8 [t, d] and e8m0 scales uint8 [t, d / 32].

    `x` bfloat16 [t, d] whose rows are dense, d a multiple of 32; `weight` float32 [d]. Codes are those of y, bit by bit; y itself
    depends on the order of one sum.
    """
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, device=x.device)
    if rows:
        shape = shape_of(width)
        _rms_quantize[(rows,)](
            x, weight, y, codes, scales, eps, x.stride(0), D=width, CHUNK=shape.chunk, PDL=shape.pdl,
            num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return y, codes, scales
