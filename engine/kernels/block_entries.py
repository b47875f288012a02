# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Entries of chosen columns, where columns are those of a row's candidate blocks side by side."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    block: int
    """Columns of a row, a program."""
    warps: int
    pdl: bool


def shape_of(width: int) -> Shape:
    """Return the shape for rows of so many columns."""
    return Shape(min(1024, next_power_of_2(width)), 4, pdl=overlaps())


@kernel
def _block_entries(
    COLUMNS, BLOCKS, OUT, count, width, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(COLUMNS + row * count + at, mask=at < count, other=-1)
    block = tl.load(BLOCKS + row * width + column // SIZE, mask=column >= 0, other=0)
    tl.store(OUT + row * count + at, tl.where(column >= 0, block * SIZE + column % SIZE, -1), mask=at < count)


def block_entries(columns: torch.Tensor, blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Return int32 [t, k]: the entries of `columns` int32 [t, k], -1 of -1.

    Column c is entry c % size of block `blocks`[t, c / size], int32 [t, n]; contiguous.
    """
    rows, count = columns.shape
    out = torch.empty_like(columns)
    if rows:
        shape = shape_of(count)
        _block_entries[(rows, cdiv(count, shape.block))](
            columns, blocks, out, count, blocks.shape[1], SIZE=size, BLOCK=shape.block, PDL=shape.pdl,
            num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return out
