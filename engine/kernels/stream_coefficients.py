# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Mixing coefficients of the residual streams: a skinny product with its mean square, split over K, then Sinkhorn.

float32 weights come as three bfloat16 parts, whose sum is exact; the streams are bfloat16: so three matrix products with
float32 sums are the float32 product. The number of splits is fixed, so that a row's bits depend on the row alone.
"""

import torch
import triton
import triton.language as tl

_COLUMNS = tl.constexpr(32)
"""Products per row, padded: pre, post and comb."""
_SPLITS, _FEW_SPLITS, _STEP = 32, 8, 64
"""Few where the streams of a tiny model are too narrow for more."""
_TILE, _STAGES = 64, 1
"""Not pipelined: triton 3.6 was seen to reuse a buffer of the pipeline before asynchronous matrix instructions had read
it (one row in some thousands was wrong, not always the same)."""


@triton.jit
def _partial(
    X, FN, PARTIAL, SQUARES, count, K: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    split = tl.program_id(1)
    exists = row < count
    column = tl.arange(0, _COLUMNS)
    total = tl.zeros((TILE, _COLUMNS), tl.float32)
    squares = tl.zeros((TILE, STEP), tl.float32)
    for start in tl.range(split * SPLIT, (split + 1) * SPLIT, STEP):
        at = start + tl.arange(0, STEP)
        x = tl.load(X + row[:, None].to(tl.int64) * K + at, mask=exists[:, None], other=0.0)
        weight = FN + column[None, :] * K + at[:, None]
        used = column[None, :] < OUT
        total = tl.dot(x, tl.load(weight + 2 * OUT * K, mask=used, other=0.0), total)
        total = tl.dot(x, tl.load(weight + OUT * K, mask=used, other=0.0), total)
        total = tl.dot(x, tl.load(weight, mask=used, other=0.0), total)
        wide = x.to(tl.float32)
        squares += wide * wide
    place = split * count + row
    tl.store(PARTIAL + place[:, None] * _COLUMNS + column, total, mask=exists[:, None])
    tl.store(SQUARES + place, tl.sum(squares, axis=1), mask=exists)


@triton.jit
def _summed(PARTIAL, row, count, first, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Return [TILE, WIDTH]: columns `first`.. of all splits, summed."""
    split = tl.arange(0, SPLITS)[:, None, None]
    place = (split * count + row[None, :, None]) * _COLUMNS + first + tl.arange(0, WIDTH)[None, None, :]
    return tl.sum(tl.load(PARTIAL + place, mask=(row < count)[None, :, None], other=0.0), axis=0)


@triton.jit
def _finish(
    PARTIAL, SQUARES, SCALE, BASE, PRE, POST, COMB, norm_eps, eps, count, K: tl.constexpr, HC: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = row < count
    stream = tl.arange(0, HC)
    cell = tl.arange(0, HC * HC)
    where = exists[:, None]
    place = tl.arange(0, SPLITS)[:, None] * count + row[None, :]
    squares = tl.sum(tl.load(SQUARES + place, mask=exists[None, :], other=0.0), axis=0)
    pre = _summed(PARTIAL, row, count, 0, HC, SPLITS)
    post = _summed(PARTIAL, row, count, HC, HC, SPLITS)
    comb = _summed(PARTIAL, row, count, 2 * HC, HC * HC, SPLITS)
    inverse = tl.rsqrt(squares / K + norm_eps)[:, None]
    pre = tl.sigmoid(pre * inverse * tl.load(SCALE) + tl.load(BASE + stream)) + eps
    post = 2.0 * tl.sigmoid(post * inverse * tl.load(SCALE + 1) + tl.load(BASE + HC + stream))
    comb = comb * inverse * tl.load(SCALE + 2) + tl.load(BASE + 2 * HC + cell)
    grid = tl.reshape(comb, (TILE, HC, HC))
    grid = tl.exp(grid - tl.expand_dims(tl.max(grid, axis=2), 2))
    grid = grid / tl.expand_dims(tl.sum(grid, axis=2), 2) + eps
    grid = grid / (tl.expand_dims(tl.sum(grid, axis=1), 1) + eps)
    for _ in tl.range(19):
        grid = grid / (tl.expand_dims(tl.sum(grid, axis=2), 2) + eps)
        grid = grid / (tl.expand_dims(tl.sum(grid, axis=1), 1) + eps)
    tl.store(PRE + row[:, None] * HC + stream, pre, mask=where)
    tl.store(POST + row[:, None] * HC + stream, post, mask=where)
    tl.store(COMB + row[:, None] * (HC * HC) + cell, tl.reshape(grid, (TILE, HC * HC)), mask=where)


def stream_coefficients(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float32 pre [t, hc], post [t, hc], comb [t, hc (from), hc (to)].

    `streams` bfloat16 [t, hc, d]; `fn` bfloat16 [3, 2 hc + hc^2, hc d], the weight as `reference.formats.thirds` cuts
    it; float32 `scale` [3], `base` [2 hc + hc^2]; contiguous, hc = 4, hc d a multiple of 64 * 8.
    """
    rows, hc, width = streams.shape
    inner = hc * width
    splits = _SPLITS if inner % (_STEP * _SPLITS) == 0 else _FEW_SPLITS
    split = inner // splits
    assert inner % (_STEP * splits) == 0
    device = streams.device
    partial = torch.empty(splits, rows, _COLUMNS.value, dtype=torch.float32, device=device)
    squares = torch.empty(splits, rows, dtype=torch.float32, device=device)
    _partial[(triton.cdiv(rows, _TILE), splits)](
        streams, fn, partial, squares, rows,
        K=inner, OUT=fn.shape[1], SPLIT=split, TILE=_TILE, STEP=128 if split % 128 == 0 else _STEP, num_warps=4,
        num_stages=_STAGES,
    )  # fmt: skip
    pre, post = (torch.empty(rows, hc, dtype=torch.float32, device=device) for _ in range(2))
    comb = torch.empty(rows, hc, hc, dtype=torch.float32, device=device)
    # A row in one warp: its sums never cross one, and twenty rounds of them are what time goes to.
    _finish[(rows,)](
        partial, squares, scale, base, pre, post, comb, norm_eps, eps, rows,
        K=inner, HC=hc, SPLITS=splits, TILE=1, num_warps=1,
    )  # fmt: skip
    return pre, post, comb
