# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The gate of a feed-forward block: silu(gate) * up, from one product that has both."""

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2


@kernel
def _silu_mul(X, OUT, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < WIDTH
    kind: tl.constexpr = X.dtype.element_ty
    gate = tl.load(X + row * (2 * WIDTH) + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(X + row * (2 * WIDTH) + WIDTH + at, mask=there, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(OUT + row * WIDTH + at, (active * up).to(kind), mask=there)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [t, i] of `gate_up` [t, 2i] contiguous, gate first; bfloat16 or float32."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        block = min(1024, next_power_of_2(width))
        _silu_mul[(rows, cdiv(width, block))](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out
