# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Cosines and sines of positions: a table for a million of them would take half a gigabyte."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    tile: int
    """Rows a program."""
    warps: int
    pdl: bool


def shape_of(rows: int) -> Shape:
    """Return the shape for so many rows."""
    return Shape(1 if rows <= 256 else 16, 1 if rows <= 256 else 4, pdl=overlaps())


@kernel
def _rotary_turns(
    POSITIONS, FREQUENCIES, COS, SIN, count, back, PAIRS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, WIDTH)
    frequency = tl.load(FREQUENCIES + pair, mask=pair < PAIRS, other=0.0)
    after_kernels_before(PDL)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    position = tl.maximum(tl.load(POSITIONS + row, mask=row < count, other=0) - back, 0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    place = row[:, None] * PAIRS + pair[None, :]
    where = (row < count)[:, None] & (pair < PAIRS)[None, :]
    tl.store(COS + place, tl.cos(angle), mask=where)
    tl.store(SIN + place, tl.sin(angle), mask=where)


def rotary_turns(positions: torch.Tensor, frequencies: torch.Tensor, back: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines float32 [t, r / 2] of the positions `back` before int64 `positions` [t], 0 at least.

    `frequencies` float32 [r / 2], radians a position; angles are float32 products.
    """
    rows, pairs = len(positions), len(frequencies)
    cos, sin = (torch.empty(rows, pairs, dtype=torch.float32, device=positions.device) for _ in range(2))
    if rows:
        shape = shape_of(rows)
        _rotary_turns[(cdiv(rows, shape.tile),)](
            positions, frequencies, cos, sin, rows, back, PAIRS=pairs, WIDTH=next_power_of_2(pairs),
            TILE=shape.tile, PDL=shape.pdl, num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return cos, sin
