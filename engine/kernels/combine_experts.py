# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The end of a feed-forward sublayer: the pairs of a row and the shared expert, summed in one order."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.overlap import after_kernels_before, options


class Shape(NamedTuple):
    """What a launch chooses."""

    block: int
    """Values of a row, a program."""
    warps: int
    pdl: bool


def shape_of(width: int) -> Shape:
    """Return the shape for rows of a width."""
    return Shape(min(1024, triton.next_power_of_2(width)), 4, pdl=False)


@triton.jit
def _combine_experts(MADE, SHARED, OUT, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    total = tl.load(SHARED + row * D + at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        total += tl.load(MADE + (row * K + k) * D + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * D + at, total.to(tl.bfloat16), mask=inside)


def combine_experts(made: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [t, d]: shared + the row's pairs, one after the other, in float32.

    `made` bfloat16 [t k, d] of `experts_down`, `shared` bfloat16 [t, d], both contiguous.
    """
    rows, width = shared.shape
    out = torch.empty_like(shared)
    if rows:
        shape = shape_of(width)
        _combine_experts[(rows, triton.cdiv(width, shape.block))](
            made, shared, out, D=width, K=len(made) // rows, BLOCK=shape.block, PDL=shape.pdl, num_warps=shape.warps,
            **options(shape.pdl),
        )  # fmt: skip
    return out
