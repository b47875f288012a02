# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Linears whose weights are kept in bfloat16 and whose results are used in float32: gates, compressors, the head."""

import torch
import triton
import triton.language as tl

_PROGRAMS = 132
"""Weights are cut into tiles as high as leaves so many of them, one a multiprocessor."""
_FIXED_TILE = 32


@triton.jit
def _plain_linear(
    X, W, OUT, count, K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here, exists = n < N, row < count
    weight = W + n.to(tl.int64)[:, None] * K
    x = X + row.to(tl.int64)[None, :] * K
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        left = tl.load(weight + k[None, :], mask=here[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(x + k[:, None], mask=exists[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(left, right, total)
    out = OUT + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, tl.trans(total), mask=exists[:, None] & here[None, :])


def plain_linear(x: torch.Tensor, weight: torch.Tensor, *, fixed: bool = False) -> torch.Tensor:
    """Return float32 [t, n] = x W^T.

    `x` bfloat16 [t, k], `weight` bfloat16 [n, k], both contiguous. Products are exact, sums float32 along k. `fixed`:
    tiles do not depend on t, so that a row's bits depend on the row alone.
    """
    rows, inner = x.shape
    out = len(weight)
    made = torch.empty(rows, out, dtype=torch.float32, device=x.device)
    if not rows:
        return made
    tile = _FIXED_TILE if fixed else max(16, min(128, triton.next_power_of_2(rows)))
    tiles = 1 if fixed else triton.cdiv(rows, tile)
    height = next((h for h in (64, 32) if triton.cdiv(out, h) * tiles >= _PROGRAMS), 16)
    _plain_linear[(triton.cdiv(out, height), triton.cdiv(rows, tile))](
        x, weight, made, rows, K=inner, N=out, ROWS=height, TILE=tile, STEP=128 if inner % 128 == 0 and tile <= 32 else 64 if inner % 64 == 0 else 32,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return made
