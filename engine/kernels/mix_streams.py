# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Mega mHC: expand a sublayer's output over the residual streams, collapse them with coefficients that are already
known, normalise and quantize the next sublayer's input; every byte is read and written once.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.device import q8_code


@triton.jit
def _mix_streams(
    Y, X, POST, COMB, PRE, W, MADE, NORMED, CODES, SCALES, eps, D: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < D
        y = tl.load(Y + row * D + at, mask=inside, other=0.0).to(tl.float32)
        old = X + row * (4 * D) + at
        x0 = tl.load(old, mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(old + D, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(old + 2 * D, mask=inside, other=0.0).to(tl.float32)
        x3 = tl.load(old + 3 * D, mask=inside, other=0.0).to(tl.float32)
        collapsed = tl.zeros((CHUNK,), tl.float32)
        for k in tl.static_range(4):
            comb = COMB + row * 16 + k
            mixed = tl.load(POST + row * 4 + k) * y + tl.load(comb) * x0
            mixed = mixed + tl.load(comb + 4) * x1 + tl.load(comb + 8) * x2 + tl.load(comb + 12) * x3
            made = mixed.to(tl.bfloat16)
            tl.store(MADE + row * (4 * D) + k * D + at, made, mask=inside)
            collapsed += tl.load(PRE + row * 4 + k) * made.to(tl.float32)
        rounded = collapsed.to(tl.bfloat16)
        # Parked where the result goes, until the norm's statistic is known.
        tl.store(NORMED + row * D + at, rounded, mask=inside)
        squares += rounded.to(tl.float32) * rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
    for start in tl.range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < D
        collapsed = tl.load(NORMED + row * D + at, mask=inside, other=0.0).to(tl.float32)
        normed = (tl.load(W + at, mask=inside, other=0.0) * (collapsed * scale)).to(tl.bfloat16)
        tl.store(NORMED + row * D + at, normed, mask=inside)
        codes, scales = q8_code(tl.reshape(normed.to(tl.float32), (CHUNK // 32, 32)))
        tl.store(CODES + row * D + at, tl.reshape(codes, (CHUNK,)), mask=inside)
        group = start // 32 + tl.arange(0, CHUNK // 32)
        tl.store(SCALES + row * (D // 32) + group, scales.to(tl.uint8), mask=group < D // 32)


def mix_streams(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return new streams bfloat16 [t, hc, d], normed bfloat16 [t, d], its e4m3 codes [t, d] and scales [t, d / 32].

    `y` bfloat16 [t, d]; `streams` bfloat16 [t, hc, d]; float32 `post`, `pre` [t, hc], `comb` [t, hc (from), hc (to)];
    `weight` float32 [d]; all contiguous, hc = 4, d a multiple of 32. New streams are equal to the reference bit by bit: products
    and sums are not fused. The collapse reads them as they are stored.
    """
    rows, num_streams, width = streams.shape
    assert num_streams == 4
    made, normed = torch.empty_like(streams), torch.empty_like(y)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=y.device)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, device=y.device)
    chunk = min(1024, triton.next_power_of_2(width))
    _mix_streams[(rows,)](
        y, streams, post, comb, pre, weight, made, normed, codes, scales, eps,
        D=width, CHUNK=chunk, num_warps=max(1, chunk // 256), enable_fp_fusion=False,
    )  # fmt: skip
    return made, normed, codes, scales
