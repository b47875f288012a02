# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Index queries from their projection: rotary embedding, and rounding to the four-bit format of index keys."""

import torch
import triton
import triton.language as tl

from engine.kernels.device import LEAST_Q4, e2m1_code, e2m1_value, exponent_ceil, inverse_power, power, rotated


@triton.jit
def _index_queries(X, COS, SIN, OUT, H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, H)
    pair = tl.arange(0, D // 2) - (D - ROPE) // 2
    at = (row * H + head)[:, None, None] * D + tl.arange(0, D // 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    even, odd = tl.split(tl.load(X + at).to(tl.float32))
    cos = tl.load(COS + row * (ROPE // 2) + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(SIN + row * (ROPE // 2) + pair, mask=pair >= 0, other=0.0)[None, :]
    even, odd = rotated(even, odd, cos, sin)
    grouped = tl.reshape(tl.join(even, odd), (H, D // 32, 32))
    scale = exponent_ceil(tl.maximum(tl.max(tl.abs(grouped), axis=2), LEAST_Q4) * (1 / 6.0))
    code = e2m1_code(grouped * tl.expand_dims(inverse_power(scale), 2)) & 15
    made = tl.reshape(e2m1_value(code) * tl.expand_dims(power(scale), 2), (H, D))
    out = OUT + (row * H + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out, made.to(tl.bfloat16))


def index_queries(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [t, h, w]: index queries turned and rounded to e2m1 with a power of two per 32 values.

    `x` bfloat16 [t, h, w] contiguous, h and w powers of two, w at least 32; `cos`, `sin` float32 [t, r / 2] turn the last
    r values of each head.
    """
    rows, heads, width = x.shape
    made = torch.empty_like(x)
    if rows:
        _index_queries[(rows,)](
            x, cos, sin, made, H=heads, D=width, ROPE=2 * cos.shape[1], num_warps=4, enable_fp_fusion=False
        )
    return made
