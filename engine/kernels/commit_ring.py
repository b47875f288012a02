# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Ring commit: the last packed rows of a chunk move to where later steps read them."""

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


def shape_of() -> Shape:
    """Return the shape."""
    return Shape(4, 4, pdl=overlaps())


@kernel
def _commit_ring(
    PACKED, TOKENS, RECORD, POSITIONS, RING, count, capacity, record_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = row < count
    token = tl.load(TOKENS + row, mask=exists, other=0)
    slot = tl.load(POSITIONS + row, mask=exists, other=0) % capacity
    record = tl.load(RECORD + row, mask=exists, other=-1)
    word = tl.arange(0, BLOCK)
    inside = (record >= 0)[:, None] & (word < WIDTH)
    values = tl.load(PACKED + (token * WIDTH)[:, None] + word, mask=inside)
    tl.store(RING + (record * record_stride + slot * WIDTH)[:, None] + word, values, mask=inside)


def commit_ring(
    packed: torch.Tensor, tokens: torch.Tensor, record: torch.Tensor, positions: torch.Tensor, ring: torch.Tensor
) -> None:
    """Copy `packed[tokens[i]]` to `ring[record[i], positions[i] % capacity]`.

    `packed` uint8 [t, width] dense, width even; `tokens`, `record` (-1: copy nothing), `positions` int64 [k], no
    place twice; `ring` uint8 [rows, capacity, width], its last two axes dense.
    """
    wide = torch.int32 if packed.shape[1] % 4 == 0 else torch.int16
    width = packed.shape[1] // wide.itemsize
    assert ring.stride()[1:] == (ring.shape[2], 1)
    if not len(tokens):
        return
    words, slots = packed.view(wide), ring.view(wide)
    shape = shape_of()
    _commit_ring[(cdiv(len(tokens), shape.tile),)](
        words, tokens, record, positions, slots, len(tokens), ring.shape[1], slots.stride(0), WIDTH=width,
        BLOCK=next_power_of_2(width), TILE=shape.tile, PDL=shape.pdl, num_warps=shape.warps,
        **options(shape.pdl),
    )  # fmt: skip
