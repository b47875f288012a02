# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The gate of the n-gram memory, fused with its addition to the residual streams."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


@kernel
def _engram_gate(X, P, W, SKIP, OUT, eps, HC: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    x = X + (row * HC + stream) * D
    key = P + row * ((HC + 1) * D) + stream * D
    value = P + row * ((HC + 1) * D) + HC * D
    products = tl.zeros((CHUNK,), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    key_squares = tl.zeros((CHUNK,), tl.float32)
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < D
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(key + at, mask=inside, other=0.0).to(tl.float32)
        products += a * tl.load(W + stream * D + at, mask=inside, other=0.0) * b
        squares += a * a
        key_squares += b * b
    affinity = tl.sum(products, axis=0) / tl.sqrt(tl.full((), D, tl.float32))
    affinity = affinity * tl.rsqrt(tl.sum(squares, axis=0) / D + eps) * tl.rsqrt(tl.sum(key_squares, axis=0) / D + eps)
    root = tl.sqrt(tl.maximum(tl.abs(affinity), 1e-6))
    # The sign by its bit: a negative zero counts as negative.
    gate = tl.sigmoid(tl.where(affinity.to(tl.int32, bitcast=True) < 0, -root, root))
    gate = tl.where(tl.load(SKIP + row) != 0, 0.0, gate)
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < D
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + (row * HC + stream) * D + at, (a + gate * b).to(tl.bfloat16), mask=inside)


class Shape(NamedTuple):
    """What a launch chooses; a program has a stream of a row."""

    chunk: int
    """Values at a time."""
    warps: int
    pdl: bool


def shape_of(width: int) -> Shape:
    """Return the shape for streams of a width: all of one at a time, if registers hold it, so that it is read once."""
    chunk = min(8192, next_power_of_2(width))
    return Shape(chunk, max(1, min(4, chunk // 256)), pdl=overlaps())


def engram_gate(
    streams: torch.Tensor, projected: torch.Tensor, weight: torch.Tensor, skip: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return bfloat16 [t, hc, d]: streams + sigmoid(signed root of their affinity to the row's keys) * value.

    `streams` bfloat16 [t, hc, d]; `projected` bfloat16 [t, (hc + 1) d]: hc keys, then the value; `weight` float32 [hc, d],
    the product of both norm weights; `skip` bool [t]: rows that pass unchanged. All contiguous.
    """
    rows, hc, width = streams.shape
    out = torch.empty_like(streams)
    if rows:
        shape = shape_of(width)
        _engram_gate[(rows, hc)](
            streams, projected, weight, skip, out, eps, HC=hc, D=width, CHUNK=shape.chunk, PDL=shape.pdl,
            num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return out
