# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Root-mean-square norm and quantization to e4m3 in groups of 32, in one pass over memory."""

import torch
import triton
import triton.language as tl

from engine.kernels.device import q8_code


@triton.jit
def _rms_quantize(X, W, Y, CODES, SCALES, eps, stride, D: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(X + row * stride + at, mask=at < D, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
    for start in tl.static_range(0, D, CHUNK):
        at = start + tl.arange(0, CHUNK)
        # The row is in the first-level cache by now.
        x = tl.load(X + row * stride + at, mask=at < D, other=0.0).to(tl.float32)
        y = (tl.load(W + at, mask=at < D, other=0.0) * (x * scale)).to(tl.bfloat16)
        tl.store(Y + row * D + at, y, mask=at < D)
        codes, scales = q8_code(tl.reshape(y.to(tl.float32), (CHUNK // 32, 32)))
        tl.store(CODES + row * D + at, tl.reshape(codes, (CHUNK,)), mask=at < D)
        group = start // 32 + tl.arange(0, CHUNK // 32)
        tl.store(SCALES + row * (D // 32) + group, scales.to(tl.uint8), mask=group < D // 32)


def rms_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y bfloat16 [t, d], its e4m3 codes uint8 [t, d] and e8m0 scales uint8 [t, d / 32].

    `x` bfloat16 [t, d] whose rows are dense, d a multiple of 32; `weight` float32 [d]. Codes are those of y, bit by bit; y itself
    depends on the order of one sum.
    """
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, device=x.device)
    chunk = min(1024, triton.next_power_of_2(width))
    if rows:
        _rms_quantize[(rows,)](
            x, weight, y, codes, scales, eps, x.stride(0), D=width, CHUNK=chunk, num_warps=max(1, chunk // 256)
        )
    return y, codes, scales
