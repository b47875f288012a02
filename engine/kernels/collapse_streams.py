# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Collapse streams that no sublayer has just written, normalise and quantize: the second half of `mix_streams`."""

import torch
import triton.language as tl

from engine.kernels.device import store_normed
from engine.kernels.launch import kernel
from engine.kernels.mix_streams import shape_of
from engine.kernels.overlap import after_kernels_before, options


@kernel
def _collapse_streams(
    X, PRE, W, NORMED, CODES, SCALES, eps, D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((CHUNK,), tl.float32)
    held = ()
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        collapsed = tl.zeros((CHUNK,), tl.float32)
        for k in tl.static_range(4):
            x = tl.load(X + (row * 4 + k) * D + at, mask=at < D, other=0.0).to(tl.float32)
            collapsed += tl.load(PRE + row * 4 + k) * x
        rounded = collapsed.to(tl.bfloat16)
        squares += rounded.to(tl.float32) * rounded.to(tl.float32)
        held += (rounded,)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        weight = tl.load(W + at, mask=at < D, other=0.0)
        normed = (weight * (held[start // CHUNK].to(tl.float32) * scale)).to(tl.bfloat16)
        store_normed(normed, NORMED, CODES, SCALES, row, start, D, CHUNK)


def collapse_streams(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return normed bfloat16 [t, d], its e4m3 codes uint8 [t, d] and e8m0 scales uint8 [t, d / 32].

    `streams` bfloat16 [t, hc, d]; float32 `pre` [t, hc], `weight` [d]; contiguous, hc = 4, d a multiple of 32. Products
    and sums are not fused.
    """
    rows, num_streams, width = streams.shape
    assert num_streams == 4
    normed = torch.empty(rows, width, dtype=torch.bfloat16, device=streams.device)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=streams.device)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, device=streams.device)
    shape = shape_of(width)
    _collapse_streams[(rows,)](
        streams, pre, weight, normed, codes, scales, eps, D=width, CHUNK=shape.chunk, PDL=shape.pdl,
        num_warps=shape.warps, enable_fp_fusion=False, **options(shape.pdl),
    )  # fmt: skip
    return normed, codes, scales
