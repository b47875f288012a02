# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The residual stream: what a block adds to it, and its root-mean-square norm for the next block, in one pass."""

import torch
import triton.language as tl

from engine.kernels.launch import kernel, next_power_of_2


@kernel
def _add_norm(X, DELTA, W, OUT, eps, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    there = at < D
    kind: tl.constexpr = X.dtype.element_ty
    x = tl.load(X + row + at, mask=there, other=0.0).to(tl.float32)
    if ADD:
        x = (x + tl.load(DELTA + row + at, mask=there, other=0.0).to(tl.float32)).to(kind)
        tl.store(X + row + at, x, mask=there)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    y = (x * scale).to(kind).to(tl.float32) * tl.load(W + at, mask=there, other=0.0).to(tl.float32)
    tl.store(OUT + row + at, y.to(kind), mask=there)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight [t, d] of the new `x`, to which `delta` was added in place.

    `x`, `delta` [t, d] contiguous, None: nothing is added; `weight` [d]; all bfloat16 or all float32. Sums are
    float32; each row is alone, whatever t is.
    """
    out = torch.empty_like(x)
    if len(x):
        block = next_power_of_2(x.shape[1])
        _add_norm[(len(x),)](
            x, x if delta is None else delta, weight, out, eps, D=x.shape[1], BLOCK=block, ADD=delta is not None,
            num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return out
