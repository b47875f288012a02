# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""What layers must know of a step's tokens besides their streams, from what a batch says of its rows: one launch."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel
from engine.kernels.overlap import after_kernels_before, options, overlaps

_NEVER = tl.constexpr(1 << 40)
"""A window floor above every position."""


class Shape(NamedTuple):
    """What a launch chooses."""

    tile: int
    """Tokens a program."""
    rows: int
    """Sequences it compares them with at a time."""
    warps: int
    pdl: bool


def shape_of() -> Shape:
    """Return the shape."""
    return Shape(16, 64, 1, pdl=overlaps())


@kernel
def _lay_tokens(
    IDS, POSITIONS, SLOTS, ROWS, Q_START, FLOORS, OWNER, RECORD, LOWEST, KEPT, KINDS, VISIBLE, count, sequences, image,
    RATIOS: tl.constexpr, HAS_FLOORS: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = token < count
    owner = tl.zeros((TILE,), tl.int32)
    for start in tl.range(0, sequences, EACH):
        at = start + tl.arange(0, EACH)
        end = tl.load(Q_START + 1 + at, mask=at < sequences, other=count)
        # Of sequences without tokens, none is the last one that begins at or before a token.
        owner += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), axis=1)
    is_real = tl.load(SLOTS + token, mask=exists, other=-1) >= 0
    owner = tl.where(is_real, tl.minimum(owner, sequences - 1), 0)
    record = tl.where(is_real, tl.load(ROWS + owner), 0)
    position = tl.load(POSITIONS + token, mask=exists, other=0)
    lowest = tl.zeros((TILE,), tl.int64)
    if HAS_FLOORS:
        lowest = tl.load(FLOORS + owner)
    lowest = tl.where(is_real, lowest, _NEVER)
    kind = tl.where(is_real, (tl.load(IDS + token, mask=exists, other=0) == image).to(tl.int32), -1)
    tl.store(OWNER + token, owner.to(tl.int64), mask=exists)
    tl.store(RECORD + token, record.to(tl.int64), mask=exists)
    tl.store(LOWEST + token, lowest, mask=exists)
    tl.store(KEPT + token, position >= lowest, mask=exists)
    tl.store(KINDS + token, kind, mask=exists)
    for i in tl.static_range(len(RATIOS)):
        seen = tl.where(is_real, (position + 1) // RATIOS[i], 0)
        tl.store(VISIBLE + i * count + token, seen.to(tl.int32), mask=exists)


def lay_tokens(
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    q_start: torch.Tensor,
    floors: torch.Tensor | None,
    image: int,
    ratios: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of t tokens: owner, record, floor int64, kept bool, kind int32 [t], and int32 [ratios, t] visible entries.

    int64 [t] `ids`, `positions`, `slots` (-1: padding); integers `rows` [b] and `q_start` [b + 1]; `floors` int64 [b] or
    None; b is at least 1. Owner is a token's sequence, record that sequence's row, both 0 for padding. A floor is the lowest
    position of a token's window: its sequence's, without floors 0, of padding above every position; kept: the token is
    not below it. Kind is 1 for the id `image` (-1: there is none), 0 for others, -1 for padding. Of entries of `ratios`
    tokens each a token sees those that end at or before it, padding none.
    """
    count, device = len(ids), ids.device
    owner, record, lowest = (torch.empty_like(positions) for _ in range(3))
    kept = torch.empty(count, dtype=torch.bool, device=device)
    kinds = torch.empty(count, dtype=torch.int32, device=device)
    visible = torch.empty(len(ratios), count, dtype=torch.int32, device=device)
    if count:
        shape = shape_of()
        _lay_tokens[(cdiv(count, shape.tile),)](
            ids, positions, slots, rows, q_start, rows if floors is None else floors, owner, record, lowest, kept, kinds,
            visible, count, len(rows), image, RATIOS=ratios, HAS_FLOORS=floors is not None, TILE=shape.tile,
            EACH=shape.rows, PDL=shape.pdl, num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return owner, record, lowest, kept, kinds, visible
