# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Linears of e4m3 weights with a power of two per block of 32 x 32, over rows quantized in groups of 32.

Both factors become bfloat16 in registers, which is exact, so that a bfloat16 product with float32 sums is the product of
the formats. Weights are the rows of the matrix product: they are what decoding reads. Groups of rows and weights that
belong together (a block-diagonal weight) are one launch.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.device import e4m3_value, power

_PROGRAMS = 132
"""Weights are cut into tiles as high as leaves so many of them, one a multiprocessor."""
_FIXED_TILE = 32


@triton.jit
def _values(codes, scales, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Return bfloat16 [ROWS, STEP] of codes [ROWS, STEP] and e8m0 scales [ROWS, STEP / 32]."""
    wide = tl.broadcast_to(tl.expand_dims(power(scales.to(tl.int32)), 2), (ROWS, STEP // 32, 32))
    return (e4m3_value(codes) * tl.reshape(wide, (ROWS, STEP))).to(tl.bfloat16)


@triton.jit
def _dense_linear(
    X, S, W, WS, OUT, count, K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    group = tl.program_id(2)
    here, exists = n < N, row < count
    inside = tl.arange(0, STEP)
    block = tl.arange(0, STEP // 32)
    weight = W + (group * N + n).to(tl.int64)[:, None] * K
    weight_scale = WS + (group * tl.cdiv(N, 32) + n // 32).to(tl.int64)[:, None] * (K // 32)
    x = X + row.to(tl.int64)[:, None] * (GROUPS * K) + group * K
    x_scale = S + row.to(tl.int64)[:, None] * (GROUPS * K // 32) + group * (K // 32)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(0, K, STEP):
        k = start + inside
        b = start // 32 + block
        codes = tl.load(weight + k[None, :], mask=here[:, None] & (k < K)[None, :], other=0)
        scales = tl.load(weight_scale + b[None, :], mask=here[:, None] & (b < K // 32)[None, :], other=127)
        x_codes = tl.load(x + k[None, :], mask=exists[:, None] & (k < K)[None, :], other=0)
        x_scales = tl.load(x_scale + b[None, :], mask=exists[:, None] & (b < K // 32)[None, :], other=127)
        values = _values(x_codes, x_scales, TILE, STEP)
        total = tl.dot(_values(codes, scales, ROWS, STEP), tl.trans(values), total)
    out = OUT + row.to(tl.int64)[:, None] * (GROUPS * N) + group * N + n[None, :]
    tl.store(out, tl.trans(total).to(tl.bfloat16), mask=exists[:, None] & here[None, :])


def dense_linear(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, *, fixed: bool = False
) -> torch.Tensor:
    """Return bfloat16 [t, G n]: group g of every row times weight g.

    `codes` uint8 [t, G k] (e4m3), `scales` uint8 [t, G k / 32] (e8m0) of rows; `weight` uint8 [G, n, k], `weight_scales`
    uint8 [G, ceil(n / 32), k / 32]; all contiguous, k a multiple of 32. Products are exact, sums float32 along k, one
    rounding. `fixed`: tiles do not depend on t, so that a row's bits depend on the row alone.
    """
    rows = len(codes)
    groups, out, inner = weight.shape
    made = torch.empty(rows, groups * out, dtype=torch.bfloat16, device=codes.device)
    if not rows:
        return made
    tile = _FIXED_TILE if fixed else max(16, min(128, triton.next_power_of_2(rows)))
    tiles = groups * (1 if fixed else triton.cdiv(rows, tile))
    heights = (128, 64, 32) if tile == 128 else (64, 32)
    height = next((h for h in heights if triton.cdiv(out, h) * tiles >= _PROGRAMS), 16)
    step = next((s for s in (256, 128, 64) if inner % s == 0 and s * (height + tile) <= 1 << 14), 32)
    grid = (triton.cdiv(out, height), triton.cdiv(rows, tile), groups)
    _dense_linear[grid](
        codes, scales, weight, weight_scales, made, rows, K=inner, N=out, GROUPS=groups,
        ROWS=height, TILE=tile, STEP=step, num_warps=8 if height == 128 else 4, num_stages=3 if height == 128 else 4,
    )  # fmt: skip
    return made
