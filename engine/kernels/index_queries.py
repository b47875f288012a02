# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Index queries from their projection: rotary embedding, and rounding to the four-bit format of index keys."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.device import LEAST_Q4, e2m1_code, e2m1_value, exponent_ceil, inverse_power, power, rotated
from engine.kernels.launch import kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    heads: int
    """Of a row, a program: a power of two."""
    warps: int
    pdl: bool


def shape_of(rows: int, heads: int) -> Shape:
    """Return the shape for rows of so many heads."""
    return Shape(min(heads, 4 if rows <= 64 else heads), 1 if rows <= 64 else 4, pdl=overlaps())


@kernel
def _index_queries(
    X, COS, SIN, OUT, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, D // 2) - (D - ROPE) // 2
    at = (row * H + head)[:, None, None] * D + tl.arange(0, D // 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    even, odd = tl.split(tl.load(X + at).to(tl.float32))
    cos = tl.load(COS + row * (ROPE // 2) + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(SIN + row * (ROPE // 2) + pair, mask=pair >= 0, other=0.0)[None, :]
    even, odd = rotated(even, odd, cos, sin)
    grouped = tl.reshape(tl.join(even, odd), (HEADS, D // 32, 32))
    scale = exponent_ceil(tl.maximum(tl.max(tl.abs(grouped), axis=2), LEAST_Q4) * (1 / 6.0))
    code = e2m1_code(grouped * tl.expand_dims(inverse_power(scale), 2)) & 15
    made = tl.reshape(e2m1_value(code) * tl.expand_dims(power(scale), 2), (HEADS, D))
    out = OUT + (row * H + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out, made.to(tl.bfloat16))


def index_queries(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [t, h, w]: index queries turned and rounded to e2m1 with a power of two per 32 values.

    `x` bfloat16 [t, h, w] contiguous, h and w powers of two, w at least 32; `cos`, `sin` float32 [t, r / 2] turn the last
    r values of each head.
    """
    rows, heads, width = x.shape
    made = torch.empty_like(x)
    if rows:
        shape = shape_of(rows, heads)
        _index_queries[(rows, heads // shape.heads)](
            x, cos, sin, made, H=heads, HEADS=shape.heads, D=width, ROPE=2 * cos.shape[1], PDL=shape.pdl,
            num_warps=shape.warps, enable_fp_fusion=False, **options(shape.pdl),
        )  # fmt: skip
    return made
