# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Compressed entries and their index keys from pending rows: pool, norm, rotate, pack to four bits, scatter.

A first kernel pools and stores entries and leaves normalised latents; a second projects those to index keys and stores
them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.device import (
    LEAST_Q4,
    LEAST_Q4KV,
    e2m1_code,
    e4m3_code,
    e4m3_value,
    exponent_ceil,
    inverse_power,
    rotated,
)
from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What the two launches choose. One shape for all numbers of rows: the order of sums depends on it."""

    tile: int
    """Rows a program of the first kernel takes."""
    warps: int
    keys_tile: int
    """Rows of the second, and columns of latents at a time."""
    step: int
    keys_warps: int
    stages: int
    pdl: bool


def shape_of() -> Shape:
    """Return the shape."""
    return Shape(4, 4, 16, 128, 4, 4, pdl=overlaps())


@triton.jit
def _turns(COS, SIN, row, exists, pair, ROPE: tl.constexpr):
    """Return cosine and sine [TILE, pairs]; `pair` counts from the first rotated one and may be negative."""
    place = row[:, None] * (ROPE // 2) + pair
    turns = exists[:, None] & (pair >= 0)
    return tl.load(COS + place, mask=turns, other=1.0), tl.load(SIN + place, mask=turns, other=0.0)


@triton.jit
def _packed(even, odd, inverse, TILE: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """Return e2m1 bytes [TILE, GROUPS * PAIRS] of pairs times the inverse [TILE, GROUPS] of their group's scale."""
    spread = tl.broadcast_to(tl.expand_dims(inverse, 2), (TILE, GROUPS, PAIRS))
    spread = tl.reshape(spread, (TILE, GROUPS * PAIRS))
    return (e2m1_code(even * spread) | (e2m1_code(odd * spread) << 4)).to(tl.uint8)


@triton.jit
def _most(even, odd, TILE: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """Return the largest magnitude [TILE, GROUPS] of groups of pairs."""
    return tl.max(tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), (TILE, GROUPS, PAIRS)), axis=2)


@kernel
def _store_main(
    PENDING, INDEX, NORM, COS, SIN, PAGE, AT, ENTRIES, LATENTS, eps, count, entry_stride,
    D: tl.constexpr, ROPE: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D)
    norm = tl.load(NORM + column)
    after_kernels_before(PDL)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = row < count
    where = exists[:, None]
    first = tl.load(INDEX + row * TOKENS, mask=exists, other=0)
    left = PENDING + first[:, None] * (TOKENS * D) + column
    pooled = tl.load(left, mask=where, other=0.0)
    if TOKENS == 2:
        second = tl.load(INDEX + row * TOKENS + 1, mask=exists, other=0)
        right = PENDING + second[:, None] * (TOKENS * D) + column
        other = tl.load(right, mask=where, other=0.0)
        gate_left = tl.load(left + D, mask=where, other=0.0)
        gate_right = tl.load(right + D, mask=where, other=0.0)
        most = tl.maximum(gate_left, gate_right)
        weight_left = tl.exp(gate_left - most)
        weight_right = tl.exp(gate_right - most)
        total = weight_left + weight_right
        pooled = (weight_left / total) * pooled + (weight_right / total) * other
    page = tl.load(PAGE + row, mask=exists, other=-1)
    kept = (page >= 0)[:, None]
    out = ENTRIES + page * entry_stride + tl.load(AT + row, mask=exists, other=0) * (D // 2 + D // 16)
    cos, sin = _turns(COS, SIN, row, exists, tl.arange(0, D // 2) - (D - ROPE) // 2, ROPE)
    pooled = pooled.to(tl.bfloat16).to(tl.float32)
    scale = tl.rsqrt(tl.sum(pooled * pooled, axis=1) / D + eps)
    latent = (norm * (pooled * scale[:, None])).to(tl.bfloat16)
    tl.store(LATENTS + row[:, None] * D + column, latent, mask=where)
    even, odd = tl.split(tl.reshape(latent.to(tl.float32), (TILE, D // 2, 2)))
    even, odd = rotated(even, odd, cos, sin)
    group = e4m3_code(tl.maximum(_most(even, odd, TILE, D // 16, 8), LEAST_Q4KV) * (1 / 6.0))
    inverse = tl.div_rn(tl.full((TILE, D // 16), 1.0, tl.float32), e4m3_value(group))
    tl.store(out[:, None] + tl.arange(0, D // 2), _packed(even, odd, inverse, TILE, D // 16, 8), mask=kept)
    tl.store(out[:, None] + D // 2 + tl.arange(0, D // 16), group, mask=kept)


@kernel
def _store_keys(
    LATENTS, WK, KEY_NORM, COS, SIN, PAGE, AT, CODES, SCALES, eps, count, code_stride, scale_stride,
    D: tl.constexpr, KEY: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    norm = tl.load(KEY_NORM + tl.arange(0, KEY))
    after_kernels_before(PDL)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = row < count
    where = exists[:, None]
    key = tl.zeros((TILE, KEY), tl.float32)
    for start in tl.range(0, D, STEP):
        column = start + tl.arange(0, STEP)
        latent = tl.load(LATENTS + row[:, None] * D + column, mask=where, other=0.0)
        key = tl.dot(latent, tl.load(WK + tl.arange(0, KEY)[None, :] * D + column[:, None]), key)
    key = key.to(tl.bfloat16).to(tl.float32)
    scale = tl.rsqrt(tl.sum(key * key, axis=1) / KEY + eps)
    key = (norm * (key * scale[:, None])).to(tl.bfloat16).to(tl.float32)
    even, odd = tl.split(tl.reshape(key, (TILE, KEY // 2, 2)))
    cos, sin = _turns(COS, SIN, row, exists, tl.arange(0, KEY // 2) - (KEY - ROPE) // 2, ROPE)
    even, odd = rotated(even, odd, cos, sin)
    group = exponent_ceil(tl.maximum(_most(even, odd, TILE, KEY // 32, 16), LEAST_Q4) * (1 / 6.0))
    packed = _packed(even, odd, inverse_power(group), TILE, KEY // 32, 16)
    page = tl.load(PAGE + row, mask=exists, other=-1)
    kept = (page >= 0)[:, None]
    at = tl.load(AT + row, mask=exists, other=0)
    codes = CODES + page * code_stride + at * (KEY // 2)
    tl.store(codes[:, None] + tl.arange(0, KEY // 2), packed, mask=kept)
    scales = SCALES + page * scale_stride + at * (KEY // 32)
    tl.store(scales[:, None] + tl.arange(0, KEY // 32), group.to(tl.uint8), mask=kept)


def store_entries(
    pending: torch.Tensor,
    index: torch.Tensor,
    norm: torch.Tensor,
    wk: torch.Tensor,
    key_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    page: torch.Tensor,
    at: torch.Tensor,
    entries: torch.Tensor,
    key_codes: torch.Tensor,
    key_scales: torch.Tensor,
    eps: float,
) -> None:
    """Store n entries at `entries[page, at]` and their index keys at `key_codes[page, at]`, `key_scales[page, at]`.

    `pending` float32 [x, 1, D] values, or [x, 2, D] values and gates; `index` int64 [n, m] the m = 1 or 2 rows that make
    an entry; `norm` float32 [D]; `wk` bfloat16 [w, D]; `key_norm` float32 [w]; `cos`, `sin` float32 [n, r / 2] of the
    entries' positions; `page` (-1: store nothing), `at` int64 [n], no place twice. Parts of KV memory, uint8, their last two axes dense:
    `entries` [pages, e, D / 2 + D / 16], `key_codes` [pages, e, w / 2], `key_scales` [pages, e, w / 32].
    D is a power of two.
    """
    count, tokens = index.shape
    width = norm.shape[0]
    assert pending.shape[1] == tokens
    if not count:
        return
    latents = torch.empty(count, width, dtype=torch.bfloat16, device=pending.device)
    shape = shape_of()
    _store_main[(cdiv(count, shape.tile),)](
        pending, index, norm, cos, sin, page, at, entries, latents, eps, count, entries.stride(0), D=width,
        ROPE=2 * cos.shape[1], TOKENS=tokens, TILE=shape.tile, PDL=shape.pdl, num_warps=shape.warps,
        **options(shape.pdl),
    )  # fmt: skip
    _store_keys[(cdiv(count, shape.keys_tile),)](
        latents, wk, key_norm, cos, sin, page, at, key_codes, key_scales, eps, count, key_codes.stride(0),
        key_scales.stride(0), D=width, KEY=wk.shape[0], ROPE=2 * cos.shape[1], TILE=shape.keys_tile,
        STEP=min(shape.step, width), PDL=shape.pdl, num_warps=shape.keys_warps, num_stages=shape.stages,
        **options(shape.pdl),
    )  # fmt: skip
