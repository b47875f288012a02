# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The end of a feed-forward sublayer: the pairs of a row and the shared expert, summed in one order."""

import torch
import triton
import triton.language as tl


@triton.jit
def _combine_experts(MADE, SHARED, OUT, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    total = tl.load(SHARED + row * D + at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        total += tl.load(MADE + (row * K + k) * D + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * D + at, total.to(tl.bfloat16), mask=inside)


def combine_experts(made: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [t, d]: shared + the row's pairs, one after the other, in float32.

    `made` bfloat16 [t k, d] of `experts_down`, `shared` bfloat16 [t, d], both contiguous.
    """
    rows, width = shared.shape
    out = torch.empty_like(shared)
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        _combine_experts[(rows, triton.cdiv(width, block))](
            made, shared, out, D=width, K=len(made) // rows, BLOCK=block, num_warps=4
        )
    return out
