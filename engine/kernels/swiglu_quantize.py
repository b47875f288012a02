# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The inner activation of a dense gated block: clamped SwiGLU, then quantized for the second projection."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.device import q8_code
from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    groups: int
    """Groups of 32 values, a program."""
    warps: int
    pdl: bool


def shape_of(count: int) -> Shape:
    """Return the shape for groups of a whole launch."""
    return Shape(32 if count >= 16_384 else 16, 4, pdl=overlaps())


@kernel
def _swiglu_quantize(X, CODES, SCALES, limit, count, INNER: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    # A row's gates lie before its other half.
    at = (group + group // (INNER // 32) * (INNER // 32))[:, None] * 32 + tl.arange(0, 32)[None, :]
    gate = tl.load(X + at, mask=inside[:, None], other=0.0).to(tl.float32)
    up = tl.load(X + INNER + at, mask=inside[:, None], other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    made = (gate * tl.sigmoid(gate) * tl.clamp(up, -limit, limit)).to(tl.bfloat16).to(tl.float32)
    codes, scales = q8_code(made)
    tl.store(CODES + group[:, None] * 32 + tl.arange(0, 32)[None, :], codes, mask=inside[:, None])
    tl.store(SCALES + group, scales.to(tl.uint8), mask=inside)


def swiglu_quantize(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes uint8 [t, I] and e8m0 scales uint8 [t, I / 32] of silu(min(gate, limit)) * clamp(up, +-limit).

    `x` bfloat16 [t, 2 I] contiguous, gates first; I a multiple of 32. The product is rounded to bfloat16 before it is
    quantized.
    """
    rows, inner = x.shape[0], x.shape[1] // 2
    codes = torch.empty(rows, inner, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, inner // 32, dtype=torch.uint8, device=x.device)
    if rows:
        count = scales.numel()
        shape = shape_of(count)
        _swiglu_quantize[(cdiv(count, shape.groups),)](
            x, codes, scales, limit, count, INNER=inner, GROUPS=shape.groups, PDL=shape.pdl, num_warps=shape.warps,
            **options(shape.pdl),
        )  # fmt: skip
    return codes, scales
