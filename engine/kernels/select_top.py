# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Exact selection of the best k of many scores, in ascending order, ties to the lowest column.

Scores become unsigned integers of the same order. A program holds a chunk of them in registers, finds the k-th largest
by two bits at a time, counts of all elements deciding, and writes its chunk's best in order. What is left is selected
from again until one chunk is left: the best k of all are among the best k of every chunk. Wide rows are read once for the
best of every group of neighbours; the best k are in the k groups whose best are the best, by the same rule for ties, and
one program a row selects among those.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps

_CHUNK = 8192
_EACH = 512
"""Columns of a warp."""
SCORES_ALL = tl.constexpr(0)
SCORES_OF_GROUPS = tl.constexpr(1)
KEYS_ALONE = tl.constexpr(2)
KEYS_AND_IDS = tl.constexpr(3)


class Shape(NamedTuple):
    """What a launch chooses."""

    chunk: int
    """Columns a program holds."""
    most_warps: int
    group: int
    """Neighbours whose best is looked at first; 1: none."""
    tile: int
    """Columns of a program that looks for those."""
    pdl: bool


def shape_of(k: int, block: int, size: int) -> Shape:
    """Return the shape for a choice of k among `size` columns, or blocks of so many."""
    wide = next_power_of_2(k)
    group = 16 if block == 1 and size > _CHUNK and 16 * wide <= _CHUNK else 1
    return Shape(max(_CHUNK, 4 * wide), 8, group, 4096, pdl=overlaps())


@triton.jit
def _ordered(score):
    """Return uint32 that order as finite float32 scores do, zeros of both signs alike; 0 for what is not finite."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(tl.abs(score) < float("inf"), flipped, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _border(key, K: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return what the best K of uint32 [CHUNK] are above, or at; 0 if there are no more than K above 0.

    Two bits at a time of the distance from a lower bound; once exactly K are found, any number does that lies between them
    and the rest.
    """
    low = tl.full((), 0, tl.uint32)
    if CHUNK >= WIDTH:
        # The best of any K groups are K keys.
        best = tl.max(tl.reshape(key, (WIDTH, CHUNK // WIDTH)), axis=1)
        low = tl.min(tl.where(tl.arange(0, WIDTH) < K, best, 0xFFFFFFFF).to(tl.uint32), axis=0)
    many = tl.sum((key > 0).to(tl.int32), axis=0) > K
    span = tl.max(key, axis=0) - low
    key = tl.where(key > low, key - low, 0).to(tl.uint32)
    # A float32's exponent is the place of its largest bit, or one more where it was rounded up.
    place = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    step = tl.where(many & (span > 0), tl.maximum(0, 31 - place) // 2, 16)
    found = tl.full((), 0, tl.uint32)
    exact = tl.full((), 0, tl.int32)
    while (step < 16) & (exact == 0):
        unit = tl.full((), 1, tl.uint32) << (30 - 2 * step).to(tl.uint32)
        one = (key >= found + unit).to(tl.int64)
        two = (key >= found + unit + unit).to(tl.int64)
        three = (key >= found + unit + unit + unit).to(tl.int64)
        counts = tl.sum(one + (two << 20) + (three << 40), axis=0)
        first, second, third = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        up = (first >= K).to(tl.int32) + (second >= K).to(tl.int32) + (third >= K).to(tl.int32)
        exact = ((first == K) | (second == K) | (third == K)).to(tl.int32)
        found += up.to(tl.uint32) * unit
        step += 1
    return tl.where(many, low + tl.where(exact > 0, found - 1, found), 0).to(tl.uint32)


@kernel
def _best_of_groups(
    SCORES, VISIBLE, OUT, size, score_stride, GROUP: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    seen = tl.load(VISIBLE + row)
    group = first // GROUP + tl.arange(0, TILE // GROUP)
    best = tl.zeros((TILE // GROUP,), tl.uint32)
    if first < seen:
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        score = tl.load(SCORES + row * score_stride + at, mask=at < seen, other=float("-inf"))
        best = tl.max(_ordered(score), axis=1)
    tl.store(OUT + row * size + group, best, mask=group < size)


@triton.jit
def _leave_empty(OUT_KEYS, OUT_IDS, out, filled, K: tl.constexpr, WIDTH: tl.constexpr, LAST: tl.constexpr):
    """Say that nothing is behind the first `filled` of K places."""
    rest = tl.arange(0, WIDTH)
    empty = (rest >= filled) & (rest < K)
    tl.store(OUT_IDS + out + rest, tl.full((WIDTH,), -1, tl.int32), mask=empty)
    if not LAST:
        tl.store(OUT_KEYS + out + rest, tl.zeros((WIDTH,), tl.uint32), mask=empty)


@kernel
def _select(
    SCORES, KEYS, IDS, VISIBLE, OUT_KEYS, OUT_IDS, size, score_stride, in_stride, out_stride,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, FROM: tl.constexpr,
    LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    if FROM == SCORES_ALL:
        seen = tl.load(VISIBLE + row)
        if (chunk > 0) & (chunk * CHUNK * BLOCK >= seen):
            # Nothing to choose from, which is what most chunks of a wide table have.
            _leave_empty(OUT_KEYS, OUT_IDS, row * out_stride + chunk * K, 0, K, WIDTH, LAST)
            return
        if BLOCK == 1:
            key = _ordered(tl.load(SCORES + row * score_stride + at, mask=at < seen, other=float("-inf")))
        else:
            place = at[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            each = _ordered(tl.load(SCORES + row * score_stride + place, mask=place < seen, other=float("-inf")))
            key = tl.max(each, axis=1)
            # The block of the newest entry always belongs.
            key = tl.where((seen > 0) & (at == (seen - 1) // BLOCK), 0xFFFFFFFF, key).to(tl.uint32)
        ids = at
    elif FROM == SCORES_OF_GROUPS:
        GROUP: tl.constexpr = CHUNK // WIDTH
        number = tl.arange(0, WIDTH)
        group = tl.load(IDS + row * in_stride + number, mask=number < K, other=-1)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        known = (group >= 0)[:, None] & (column < tl.load(VISIBLE + row))
        key = _ordered(tl.load(SCORES + row * score_stride + column, mask=known, other=float("-inf")))
        key, ids = tl.reshape(key, (CHUNK,)), tl.reshape(column, (CHUNK,))
    else:
        key = tl.load(KEYS + row * in_stride + at, mask=at < size, other=0)
        ids = at
        if FROM == KEYS_AND_IDS:
            ids = tl.load(IDS + row * in_stride + at, mask=at < size, other=-1)
    border = _border(key, K, WIDTH, CHUNK)
    above = key > border
    equal = (key == border) & (key > 0)
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    through = tl.cumsum(both, axis=0)
    before = through - both
    total = tl.sum(both, axis=0)
    free = K - (total & 0xFFFF)
    equal_before = before >> 16
    chosen = above | (equal & (equal_before < free))
    place = (before & 0xFFFF) + tl.minimum(equal_before, free)
    out = row * out_stride + chunk * K
    tl.store(OUT_IDS + out + place, ids, mask=chosen)
    filled = (total & 0xFFFF) + tl.minimum(total >> 16, free)
    _leave_empty(OUT_KEYS, OUT_IDS, out, filled, K, WIDTH, LAST)
    if not LAST:
        tl.store(OUT_KEYS + out + place, key, mask=chosen)


def select_top(scores: torch.Tensor, visible: torch.Tensor, k: int, block: int) -> torch.Tensor:
    """Return int32 [t, k]: the best columns of every row in ascending order, -1 behind the last.

    `scores` float32 [t, n], rows dense; `visible` int32 [t]: columns that count. Only finite scores can be chosen; equal
    ones go to the lowest column. With `block` > 1 neighbouring columns are chosen together by their best score, numbers
    are those of blocks, and the block of column visible - 1 is always chosen.
    """
    rows, size = scores.shape
    size = cdiv(size, block)
    shape = shape_of(k, block, size)
    if shape.group == 1:
        return _selected(scores, scores, scores, visible, k, block, shape, SCORES_ALL.value, size)
    size = cdiv(size, shape.group)
    best = torch.empty(rows, size, dtype=torch.uint32, device=scores.device)
    _best_of_groups[(rows, cdiv(size * shape.group, shape.tile))](
        scores, visible, best, size, scores.stride(0), GROUP=shape.group, TILE=shape.tile, PDL=shape.pdl, num_warps=4,
        **options(shape.pdl),
    )  # fmt: skip
    groups = _selected(scores, best, best, visible, k, 1, shape, KEYS_ALONE.value, size)
    return _selected(
        scores, best, groups, visible, k, 1, shape, SCORES_OF_GROUPS.value, next_power_of_2(k) * shape.group
    )


def _selected(
    scores: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor, visible: torch.Tensor, k: int, block: int, shape: Shape,
    source: int, size: int,
) -> torch.Tensor:  # fmt: skip
    rows, device = len(scores), scores.device
    while True:
        chunks = cdiv(size, shape.chunk)
        out_ids = torch.empty(rows, chunks * k, dtype=torch.int32, device=device)
        out_keys = out_ids if chunks == 1 else torch.empty(rows, chunks * k, dtype=torch.uint32, device=device)
        width = min(shape.chunk, next_power_of_2(size))
        stride = (ids if source == SCORES_OF_GROUPS.value else keys).stride(0)
        _select[(rows, chunks)](
            scores, keys, ids, visible, out_keys, out_ids, size, scores.stride(0), stride, out_ids.stride(0),
            K=k, WIDTH=next_power_of_2(k), BLOCK=block, CHUNK=width, FROM=source, LAST=chunks == 1,
            PDL=shape.pdl, num_warps=max(1, min(shape.most_warps, width // _EACH)), **options(shape.pdl),
        )  # fmt: skip
        if chunks == 1:
            return out_ids
        keys, ids, size, source = out_keys, out_ids, chunks * k, KEYS_AND_IDS.value
