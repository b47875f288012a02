# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Quantization of rows as a quantized linear reads them: e4m3 with a power of two per 32 values."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.device import q8_code
from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    block: int
    """Values a program."""
    warps: int
    pdl: bool


def shape_of() -> Shape:
    """Return the shape."""
    return Shape(2048, 4, pdl=overlaps())


@kernel
def _quantize_rows(X, CODES, SCALES, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < count, other=0.0).to(tl.float32)
    codes, scales = q8_code(tl.reshape(x, (BLOCK // 32, 32)))
    tl.store(CODES + at, tl.reshape(codes, (BLOCK,)), mask=at < count)
    group = tl.program_id(0).to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(SCALES + group, scales.to(tl.uint8), mask=group < count // 32)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes uint8 [t, n] and e8m0 scales uint8 [t, n / 32] of `x` bfloat16 [t, n], contiguous, 32 | n."""
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, device=x.device)
    if rows:
        shape = shape_of()
        _quantize_rows[(cdiv(rows * width, shape.block),)](
            x, codes, scales, rows * width, BLOCK=shape.block, PDL=shape.pdl, num_warps=shape.warps,
            **options(shape.pdl),
        )  # fmt: skip
    return codes, scales
