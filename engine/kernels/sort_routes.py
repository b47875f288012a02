# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Sorts (row, expert) pairs by expert, keeping the order of pairs: one launch, no atomics, the same result every time."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses; a program has an expert."""

    chunk: int
    """Pairs at a time."""
    warps: int
    pdl: bool


def shape_of(pairs: int) -> Shape:
    """Return the shape for so many pairs."""
    return Shape(min(4096, next_power_of_2(pairs)), 4, pdl=overlaps())


@kernel
def _sort_routes(EXPERTS, ORDER, OFFSETS, count, num_experts, CHUNK: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    expert = tl.program_id(0)
    below = tl.zeros((CHUNK,), tl.int32)
    for start in tl.range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        chosen = tl.load(EXPERTS + at, mask=at < count, other=-1)
        below += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
    begin = tl.sum(below, axis=0)
    tl.store(OFFSETS + expert, begin)
    if expert == num_experts:
        # The last program fills what no expert owns.
        for start in tl.range(0, count, CHUNK):
            at = start + tl.arange(0, CHUNK)
            tl.store(ORDER + at, tl.full((CHUNK,), -1, tl.int32), mask=(at >= begin) & (at < count))
    else:
        for start in tl.range(0, count, CHUNK):
            at = start + tl.arange(0, CHUNK)
            own = (tl.load(EXPERTS + at, mask=at < count, other=-1) == expert).to(tl.int32)
            place = begin + tl.cumsum(own, axis=0) - own
            tl.store(ORDER + place, at, mask=own != 0)
            begin += tl.sum(own, axis=0)


def sort_routes(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `order` int32 [t k] and `offsets` int32 [E + 1] of `experts` int32 [t, k] (-1: nowhere).

    `order[offsets[e] : offsets[e + 1]]` are the pairs (row * k + column) of expert e, ascending; -1 behind the last.
    """
    count = experts.numel()
    order = torch.empty(count, dtype=torch.int32, device=experts.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    shape = shape_of(count)
    _sort_routes[(num_experts + 1,)](
        experts, order, offsets, count, num_experts, CHUNK=shape.chunk, PDL=shape.pdl, num_warps=shape.warps,
        **options(shape.pdl),
    )  # fmt: skip
    return order, offsets
