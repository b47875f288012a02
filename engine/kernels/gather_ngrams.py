# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The last tokens up to every token of a step, from the step itself and from what rows remember of earlier ones."""

from typing import NamedTuple

import torch
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps


class Shape(NamedTuple):
    """What a launch chooses."""

    tile: int
    """Tokens a program."""
    warps: int
    pdl: bool


def shape_of() -> Shape:
    """Return the shape."""
    return Shape(32, 1, pdl=overlaps())


@kernel
def _gather_ngrams(
    IDS, OWNER, Q_START, HISTORY, NGRAMS, count, image, LENGTH: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None]
    back = tl.arange(0, WIDTH)[None, :]
    where = (token < count) & (back < LENGTH)
    owner = tl.load(OWNER + token, mask=token < count, other=0)
    inside = token - tl.load(Q_START + owner) - back
    own = tl.load(IDS + tl.maximum(token - back, 0), mask=where & (inside >= 0), other=-1)
    at = owner * (LENGTH - 1) + tl.minimum(tl.maximum(inside + LENGTH - 1, 0), LENGTH - 2)
    before = tl.load(HISTORY + at, mask=where & (inside < 0), other=-1)
    found = tl.where(inside >= 0, own, before)
    tl.store(NGRAMS + token * LENGTH + back, tl.where(found == image, -1, found), mask=where)


def gather_ngrams(
    ids: torch.Tensor, owner: torch.Tensor, q_start: torch.Tensor, history: torch.Tensor, image: int
) -> torch.Tensor:
    """Return int64 [t, n]: every token, then older ones of its sequence; -1 where there is none or it is `image`.

    int64 `ids`, `owner` [t], `history` [b, n - 1] (the tokens before each sequence's first, newest last, -1: none); integers
    `q_start` [b + 1], with which tokens are laid as `lay_tokens` says. `image` is an id, -1: there is none.
    """
    count, length = len(ids), history.shape[1] + 1
    ngrams = torch.empty(count, length, dtype=torch.int64, device=ids.device)
    if count:
        shape = shape_of()
        _gather_ngrams[(cdiv(count, shape.tile),)](
            ids, owner, q_start, history, ngrams, count, image, LENGTH=length, WIDTH=next_power_of_2(length),
            TILE=shape.tile, PDL=shape.pdl, num_warps=shape.warps, **options(shape.pdl),
        )  # fmt: skip
    return ngrams
