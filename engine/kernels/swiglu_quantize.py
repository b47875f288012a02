# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The inner activation of a dense gated block: clamped SwiGLU, then quantized for the second projection."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.device import q8_code
from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    block: int
    """Values of a row, a program."""
    warps: int
    pdl: bool


def shape_of(width: int) -> Shape:
    """Return the shape for rows of a width."""
    return Shape(min(512, next_power_of_2(width)), 4, pdl=overlaps())


@kernel
def _swiglu_quantize(X, CODES, SCALES, limit, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    gate = tl.load(X + row * (2 * INNER) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * (2 * INNER) + INNER + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    made = (gate * tl.sigmoid(gate) * tl.clamp(up, -limit, limit)).to(tl.bfloat16).to(tl.float32)
    codes, scales = q8_code(tl.reshape(made, (BLOCK // 32, 32)))
    tl.store(CODES + row * INNER + at, tl.reshape(codes, (BLOCK,)), mask=inside)
    group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(SCALES + row * (INNER // 32) + group, scales.to(tl.uint8), mask=group < INNER // 32)


def swiglu_quantize(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes uint8 [t, I] and e8m0 scales uint8 [t, I / 32] of silu(min(gate, limit)) * clamp(up, +-limit).

    `x` bfloat16 [t, 2 I] contiguous, gates first; I a multiple of 32. The product is rounded to bfloat16 before it is
    quantized.
    """
    rows, inner = x.shape[0], x.shape[1] // 2
    codes = torch.empty(rows, inner, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, inner // 32, dtype=torch.uint8, device=x.device)
    if rows:
        shape = shape_of(inner)
        _swiglu_quantize[(rows, cdiv(inner, shape.block))](
            x, codes, scales, limit, INNER=inner, BLOCK=shape.block, PDL=shape.pdl, num_warps=shape.warps,
            **options(shape.pdl),
        )  # fmt: skip
    return codes, scales
