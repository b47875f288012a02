# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""From the projections of queries, keys and values to rotated queries and stored keys and values, in one pass."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import kernel, next_power_of_2


@triton.jit
def _turned(first, second, cos, sin):
    """Return a pair of halves turned, every product rounded to the element type as tensor arithmetic does."""
    kind: tl.constexpr = first.dtype
    a, b, c, s = first.to(tl.float32), second.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    real = (a * c).to(kind).to(tl.float32) - (b * s).to(kind).to(tl.float32)
    other = (b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32)
    return real.to(kind), other.to(kind)


@kernel
def _store_kv(
    QKV, COS, SIN, POSITIONS, SLOTS, PAGES, QUERY, page_stride, value_stride, head_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, D // 2)[None, :]
    turn = tl.load(POSITIONS + token) * (D // 2) + half
    cos, sin = tl.load(COS + turn), tl.load(SIN + turn)
    row = QKV + token * ((H + 2 * K) * D)
    head = tl.arange(0, HEADS)[:, None]
    there = head < H
    at = row + head * D + half
    first, second = tl.load(at, mask=there, other=0.0), tl.load(at + D // 2, mask=there, other=0.0)
    first, second = _turned(first, second, cos, sin)
    out = QUERY + token * (H * D) + head * D + half
    tl.store(out, first, mask=there)
    tl.store(out + D // 2, second, mask=there)
    slot = tl.load(SLOTS + token)
    head = tl.arange(0, KV)[:, None]
    there = head < K
    kept = head < tl.where(slot >= 0, K, 0)
    at = row + (H + head) * D + half
    first, second = tl.load(at, mask=there, other=0.0), tl.load(at + D // 2, mask=there, other=0.0)
    first, second = _turned(first, second, cos, sin)
    out = PAGES + (slot // PAGE) * page_stride + head * head_stride + (slot % PAGE) * D + half
    tl.store(out, first, mask=kept)
    tl.store(out + D // 2, second, mask=kept)
    at += K * D
    out += value_stride
    tl.store(out, tl.load(at, mask=there, other=0.0), mask=kept)
    tl.store(out + D // 2, tl.load(at + D // 2, mask=there, other=0.0), mask=kept)


def store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """Return rotated queries [t, h, d]; store rotated keys, and values, at `slots`.

    `qkv` [t, (h + 2k) d] contiguous: queries, keys, values; `cos`, `sin` [positions, d / 2] contiguous, halves turn
    together; `positions`, `slots` int64 [t], slot = page * p + offset, -1: store nothing, no slot twice; `pages`
    [num_pages, 2, k, p, d] is one layer of KV memory, its last two axes dense. All floats of one type, bfloat16 or
    float32; d a power of two from 16.
    """
    kv_heads, size, width = pages.shape[2:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    assert pages.stride()[3:] == (width, 1)
    query = qkv.new_empty(qkv.shape[0], heads, width)
    if len(qkv):
        _store_kv[(len(qkv),)](
            qkv, cos, sin, positions, slots, pages, query, pages.stride(0), pages.stride(1), pages.stride(2),
            H=heads, K=kv_heads, D=width, PAGE=size, HEADS=next_power_of_2(heads),
            KV=next_power_of_2(kv_heads), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return query
