# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Window rows from their projection into their ring: norm, rotary embedding, quantization, packing, scatter."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.device import q8_code, rotated
from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses. One shape for all numbers of rows: the order of the norm's sum depends on it."""

    tile: int
    """Rows a program."""
    warps: int
    pdl: bool


def shape_of() -> Shape:
    """Return the shape."""
    return Shape(1, 1, pdl=overlaps())


@kernel
def _store_window(
    X, W, COS, SIN, RECORD, AT, ROWS, eps, count, record_stride, stride,
    D: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = row < count
    at = tl.arange(0, D)
    weight = tl.load(W + at)
    after_kernels_before(PDL)
    record = tl.load(RECORD + row, mask=exists, other=-1)
    out = ROWS + record * record_stride + tl.load(AT + row, mask=exists, other=0) * WIDTH
    kept = (record >= 0)[:, None]
    turn = tl.arange(0, D // 2) - (D - ROPE) // 2
    place = row[:, None] * (ROPE // 2) + turn
    turns = exists[:, None] & (turn >= 0)
    cos = tl.load(COS + place, mask=turns, other=1.0)
    sin = tl.load(SIN + place, mask=turns, other=0.0)
    x = tl.load(X + row[:, None].to(tl.int64) * stride + at, mask=exists[:, None], other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    y = (weight * (x * scale[:, None])).to(tl.bfloat16).to(tl.float32)
    even, odd = tl.split(tl.reshape(y, (TILE, D // 2, 2)))
    even, odd = rotated(even, odd, cos, sin)
    codes, scales = q8_code(tl.reshape(tl.join(even, odd), (TILE, D // 32, 32)))
    tl.store(out[:, None] + at, tl.reshape(codes, (TILE, D)), mask=kept)
    tl.store(out[:, None] + D + tl.arange(0, D // 32), scales.to(tl.uint8), mask=kept)


def store_window(
    latents: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    record: torch.Tensor,
    at: torch.Tensor,
    rows: torch.Tensor,
    eps: float,
) -> None:
    """Store [t, D] latents as rows of D e4m3 codes and D / 32 e8m0 scales at `rows[record, at]`.

    `latents` bfloat16 [t, D], each row dense, D a power of two; `weight` float32 [D]; `cos`, `sin` float32 [t, r / 2] turn
    the last r values; `record` (-1: store nothing), `at` int64 [t], no place twice; `rows` uint8 [n, capacity,
    D + D / 32] whose last two axes are dense: a ring's part of KV memory, or the rows of one chunk as one record.
    """
    count, width = latents.shape
    assert rows.stride()[1:] == (rows.shape[2], 1)
    if not count:
        return
    shape = shape_of()
    _store_window[(cdiv(count, shape.tile),)](
        latents, weight, cos, sin, record, at, rows, eps, count, rows.stride(0), latents.stride(0), D=width,
        ROPE=2 * cos.shape[1], WIDTH=rows.shape[2], TILE=shape.tile, PDL=shape.pdl, num_warps=shape.warps,
        **options(shape.pdl),
    )  # fmt: skip
