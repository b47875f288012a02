# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Which compressed entries a step completes, and what of its tokens stays pending: one launch for a ratio."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    tile: int
    """Tokens a program."""
    warps: int
    pdl: bool


def shape_of() -> Shape:
    """Return the shape."""
    return Shape(128, 4, pdl=overlaps())


@kernel
def _lay_entries(
    POSITIONS, SLOTS, OWNER, RECORD, Q_START, START, LEAST, PAGE, AT, INDEX, NUMBER, PENDING, count, page_tokens,
    pending, M: tl.constexpr, HAS_LEAST: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = token < count
    position = tl.load(POSITIONS + token, mask=exists, other=0)
    slot = tl.load(SLOTS + token, mask=exists, other=-1)
    owner = tl.load(OWNER + token, mask=exists, other=0)
    is_real = slot >= 0
    done = is_real & ((position + 1) % M == 0)
    if HAS_LEAST:
        done = done & (position >= tl.load(LEAST + token, mask=exists, other=0))
    slot = tl.maximum(slot, 0)
    tl.store(PAGE + token, tl.where(done, slot // page_tokens, -1), mask=exists)
    tl.store(AT + token, slot % page_tokens // M, mask=exists)
    first = tl.load(Q_START + owner)
    if M == 2:
        before = tl.where(token == first, count + owner, tl.maximum(token - 1, 0))
        tl.store(INDEX + token * 2, before.to(tl.int64), mask=exists)
    tl.store(INDEX + token * M + (M - 1), token.to(tl.int64), mask=exists)
    tl.store(NUMBER + token, token.to(tl.int64), mask=exists)
    end = tl.load(START + owner) + tl.load(Q_START + owner + 1) - first
    record = tl.load(RECORD + token, mask=exists, other=0)
    tl.store(PENDING + token, tl.where(is_real & (position >= end - pending), record, -1), mask=exists)


def lay_entries(
    positions: torch.Tensor,
    slots: torch.Tensor,
    owner: torch.Tensor,
    record: torch.Tensor,
    q_start: torch.Tensor,
    start: torch.Tensor,
    least: torch.Tensor | None,
    m: int,
    page_tokens: int,
    pending: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int64 page [t] (-1: none), place in it [t], index [t, m], number [t] and record [t] (-1: none).

    Token i completes the entry of the m = 1 or 2 tokens that end with it if its position says so and is not below
    `least` [t] (None: no bounds). Its page is the slot's, of `page_tokens`; index has the rows that make it: its own, i, and
    with m = 2 before that i - 1, or t + its sequence if it is its sequence's first token. Number is 0, 1, 2 ..; record is
    the token's own where it is among the last `pending` of its sequence. int64 [t] `positions`, `slots`, and `owner`,
    `record` of `lay_tokens`; integers `q_start` [b + 1] and `start` [b], tokens in KV before the step.
    """
    count = len(positions)
    page, at, number, kept = (torch.empty_like(positions) for _ in range(4))
    index = torch.empty(count, m, dtype=torch.int64, device=positions.device)
    if count:
        shape = shape_of()
        _lay_entries[(cdiv(count, shape.tile),)](
            positions, slots, owner, record, q_start, start, owner if least is None else least, page, at, index, number,
            kept, count, page_tokens, pending, M=m, HAS_LEAST=least is not None, TILE=shape.tile, PDL=shape.pdl,
            num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return page, at, index, number, kept
