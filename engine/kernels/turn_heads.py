# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Rotary embedding of query heads, in place: only the turned values are read and written."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.device import rotated
from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    heads: int
    """Of a row, a program."""
    warps: int
    pdl: bool


def shape_of(rows: int, heads: int) -> Shape:
    """Return the shape for rows of so many heads."""
    return Shape(min(8, next_power_of_2(heads)), 4 if rows <= 64 else 1, pdl=overlaps())


@kernel
def _turn_heads(
    X, COS, SIN, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    turns = pair < ROPE // 2
    where = (head < H)[:, None, None] & turns[None, :, None]
    at = X + (row * H + head)[:, None, None] * D + (D - ROPE) + 2 * pair[None, :, None] + tl.arange(0, 2)[None, None, :]
    even, odd = tl.split(tl.load(at, mask=where, other=0.0).to(tl.float32))
    cos = tl.load(COS + row * (ROPE // 2) + pair, mask=turns, other=1.0)[None, :]
    sin = tl.load(SIN + row * (ROPE // 2) + pair, mask=turns, other=0.0)[None, :]
    even, odd = rotated(even, odd, cos, sin)
    tl.store(at, tl.join(even, odd).to(tl.bfloat16), mask=where)


def turn_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the last r values of every head of `x` bfloat16 [t, h, D], contiguous, in place.

    `cos`, `sin` float32 [t, r / 2]: neighbouring values are pairs.
    """
    rows, heads, width = x.shape
    if not rows:
        return
    pairs = cos.shape[1]
    shape = shape_of(rows, heads)
    _turn_heads[(rows, cdiv(heads, shape.heads))](
        x, cos, sin, H=heads, HEADS=shape.heads, D=width, ROPE=2 * pairs, PAIRS=next_power_of_2(pairs),
        PDL=shape.pdl, num_warps=shape.warps, enable_fp_fusion=False, **options(shape.pdl),
    )  # fmt: skip
