# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Borders of `token_borders` for the rows that nothing faster settles: a program reads such a row up to 36 times."""

import triton
import triton.language as tl

from engine.kernels.best_ids import scaled_keys, value_of, weight_of
from engine.kernels.launch import kernel


@triton.jit
def _keys_at(logits, begin, vocab, TEMPERATURE, TILE: tl.constexpr):
    token = begin + tl.arange(0, TILE)
    return scaled_keys(
        tl.load(logits + token, mask=token < vocab, other=float("-inf")), tl.load(TEMPERATURE).to(tl.float32)
    )


@triton.jit
def _largest_of_row(logits, TEMPERATURE, floor, top, goal, vocab, MASS: tl.constexpr, TILE: tl.constexpr):
    """Return the largest uint32 c for which ids of keys >= c and >= floor number, or weigh, `goal` float64 at least."""
    found = tl.full((), 0, tl.uint32)
    for step in range(16):
        unit = tl.full((), 1 << 30, tl.uint32) >> (2 * step)
        one = tl.zeros((TILE,), tl.float64)
        two = tl.zeros((TILE,), tl.float64)
        three = tl.zeros((TILE,), tl.float64)
        for begin in range(0, vocab, TILE):
            key = _keys_at(logits, begin, vocab, TEMPERATURE, TILE)
            weight = tl.where(key >= floor, weight_of(key, top) if MASS else 1.0, 0.0)
            one += tl.where(key >= found + unit, weight, 0.0)
            two += tl.where(key >= found + unit + unit, weight, 0.0)
            three += tl.where(key >= found + unit + unit + unit, weight, 0.0)
        up = (tl.sum(one, axis=0) >= goal).to(tl.uint32) + (tl.sum(two, axis=0) >= goal).to(tl.uint32)
        found += (up + (tl.sum(three, axis=0) >= goal).to(tl.uint32)) * unit
    return found


@triton.jit
def _beside(logits, TEMPERATURE, top, border, vocab, TILE: tl.constexpr):
    """Return how many keys are above a border, their mass, and how many are equal to it."""
    above = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.float64)
    equal = tl.zeros((TILE,), tl.int32)
    for begin in range(0, vocab, TILE):
        key = _keys_at(logits, begin, vocab, TEMPERATURE, TILE)
        above += (key > border).to(tl.int32)
        mass += tl.where(key > border, weight_of(key, top), 0.0)
        equal += (key == border).to(tl.int32)
    return tl.sum(above, axis=0).to(tl.int64), tl.sum(mass, axis=0), tl.sum(equal, axis=0).to(tl.int64)


@kernel
def search_whole(
    LOGITS, AT, TEMPERATURE, TOP_K, TOP_P, TOP, FLOOR, LEFT, LOW, BORDER, LAST, MODE, vocab, row_stride, parts,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For rows whose MODE is not 0: read them until the border is found, two bits of its key a reading."""
    row = tl.program_id(0)
    if tl.load(MODE + row) == 0:
        return
    logits = LOGITS + tl.load(AT + row) * row_stride
    floor, top = tl.load(FLOOR + row), tl.load(TOP + row)
    part = row * parts + tl.arange(0, PARTS)
    real = tl.arange(0, PARTS) < parts
    left = tl.sum(tl.load(LEFT + part, mask=real, other=0).to(tl.int64), axis=0)
    lowest = tl.full((1,), 0, tl.float32) + tl.min(tl.load(LOW + part, mask=real, other=float("inf")), axis=0)
    border = tl.max(scaled_keys(lowest, tl.load(TEMPERATURE + row).to(tl.float32)), axis=0)
    top_k = tl.load(TOP_K + row)
    top_p = tl.load(TOP_P + row)
    count = tl.where(top_k > 0, tl.minimum(top_k, left), left)
    if count < left:
        border = _largest_of_row(logits, TEMPERATURE + row, floor, top, count.to(tl.float64), vocab, False, TILE)
    above, mass, equal = _beside(logits, TEMPERATURE + row, top, border, vocab, TILE)
    if top_p < 1:
        goal = top_p * (mass + (count - above).to(tl.float64) * weight_of(border, top))
        # Sums in two orders may miss a goal that is all.
        border = tl.maximum(border, _largest_of_row(logits, TEMPERATURE + row, floor, top, goal, vocab, True, TILE))
        above, mass, equal = _beside(logits, TEMPERATURE + row, top, border, vocab, TILE)
        missing = tl.ceil((goal - mass) / tl.maximum(weight_of(border, top), 1e-300))
        count = tl.minimum(count, above + tl.maximum(tl.minimum(missing, equal.to(tl.float64)), 1.0).to(tl.int64))
    last = tl.full((), vocab, tl.int64)
    wanted = count - above
    if wanted < equal:
        passed = tl.zeros((), tl.int64)
        for begin in range(0, vocab, TILE):
            key = _keys_at(logits, begin, vocab, TEMPERATURE + row, TILE)
            token = begin + tl.arange(0, TILE)
            through = tl.cumsum((key == border).to(tl.int32), axis=0) + passed
            found = (key == border) & (through == wanted)
            last = tl.minimum(last, tl.min(tl.where(found, token, vocab), axis=0).to(tl.int64))
            passed = tl.max(through, axis=0)
    tl.store(BORDER + row, value_of(border).to(tl.float64))
    tl.store(LAST + row, last)
