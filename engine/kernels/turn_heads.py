# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Rotary embedding of query heads, in place: only the turned values are read and written."""

import torch
import triton
import triton.language as tl

from engine.kernels.device import rotated


@triton.jit
def _turn_heads(
    X, COS, SIN, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    turns = pair < ROPE // 2
    where = (head < H)[:, None, None] & turns[None, :, None]
    at = X + (row * H + head)[:, None, None] * D + (D - ROPE) + 2 * pair[None, :, None] + tl.arange(0, 2)[None, None, :]
    even, odd = tl.split(tl.load(at, mask=where, other=0.0).to(tl.float32))
    cos = tl.load(COS + row * (ROPE // 2) + pair, mask=turns, other=1.0)[None, :]
    sin = tl.load(SIN + row * (ROPE // 2) + pair, mask=turns, other=0.0)[None, :]
    even, odd = rotated(even, odd, cos, sin)
    tl.store(at, tl.join(even, odd).to(tl.bfloat16), mask=where)


def turn_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the last r values of every head of `x` bfloat16 [t, h, D], contiguous, in place.

    `cos`, `sin` float32 [t, r / 2]: neighbouring values are pairs.
    """
    rows, heads, width = x.shape
    if not rows:
        return
    pairs = cos.shape[1]
    _turn_heads[(rows,)](
        x, cos, sin, H=heads, HEADS=triton.next_power_of_2(heads), D=width, ROPE=2 * pairs,
        PAIRS=triton.next_power_of_2(pairs), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
