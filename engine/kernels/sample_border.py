# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Which ids min-p, top-k and top-p leave of a row, without sorting it: the border is searched for among the bits of floats.

A pass over the rows counts, or sums, what is above eight thresholds at once and leaves an eighth of the range; tiles
without a value in the range cost a load. Programs share a row and leave parts, which the next pass adds up in their order.
Sums are float64.
"""

import torch
import triton
import triton.language as tl

_TILE = 512
_PART = 8192
"""Values a program looks at."""
_PASSES = 11
"""Of three bits each: 32 bits and one to spare."""


@triton.jit
def _keys(values):
    """Return int32 in the order of float32 values; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """Return the float64 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _parts(PARTS, row, count, WIDTH: tl.constexpr):
    """Return the parts of a row [WIDTH], zeros behind them."""
    part = tl.arange(0, WIDTH)
    return tl.load(PARTS + row * count + part, mask=part < count, other=0.0)


@triton.jit
def _tops(SCALED, TOPS, vocab, PART: tl.constexpr):
    """The greatest of every part."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    values = tl.load(SCALED + row.to(tl.int64) * vocab + token, mask=token < vocab, other=float("-inf"))
    tl.store(TOPS + row * tl.num_programs(1) + part, tl.max(values, axis=0))


@triton.jit
def _top(TOPS, row, count, WIDTH: tl.constexpr):
    part = tl.arange(0, WIDTH)
    return tl.max(tl.load(TOPS + row * count + part, mask=part < count, other=float("-inf")), axis=0).to(tl.float64)


@triton.jit
def _kept(SCALED, TOPS, MIN, KEPT, LEAST, vocab, WIDTH: tl.constexpr, PART: tl.constexpr):
    """How many of every part min-p leaves, compared in float64, and the least of them."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    count = tl.num_programs(1)
    top = _top(TOPS, row, count, WIDTH)
    token = part * PART + tl.arange(0, PART)
    values = tl.load(SCALED + row.to(tl.int64) * vocab + token, mask=token < vocab, other=float("-inf"))
    stays = (values.to(tl.float64) - top >= tl.load(MIN + row)) & (token < vocab)
    tl.store(KEPT + row * count + part, tl.sum(stays.to(tl.int32), axis=0).to(tl.float64))
    tl.store(LEAST + row * count + part, tl.min(tl.where(stays, values, float("inf")), axis=0))


@triton.jit
def _so_far(LOWS, OVERS, FOUND, goal, row, rows, number, count, WIDTH: tl.constexpr):
    """Return the range's low end int64 and what is above its high end, as `number` passes left them."""
    low = tl.full((), -2147483648, tl.int64)
    over = tl.full((), 0.0, tl.float64)
    if number > 0:
        before = (number - 1) * rows + row
        part = tl.arange(0, WIDTH)[:, None]
        at = (before * count + part) * 8 + tl.arange(0, 8)[None, :]
        over = tl.load(OVERS + before)
        found = over + tl.sum(tl.load(FOUND + at, mask=part < count, other=0.0), axis=0)
        enough = found >= goal
        step = tl.full((), 1, tl.int64) << (33 - 3 * number)
        low = tl.load(LOWS + before) + tl.sum(enough.to(tl.int64), axis=0) * step
        # The first threshold that has less is the high end of the new range.
        over = tl.max(tl.where(enough, -1.0, found), axis=0)
    return low, over


@triton.jit
def _goal(MASS, BORDERS, TIES, TOPS, TOP_P, row, count, WIDTH: tl.constexpr):
    """Return the mass that a nucleus must reach; 0 where a row has none."""
    top_p = tl.load(TOP_P + row)
    top = _top(TOPS, row, count, WIDTH)
    ties = tl.sum(_parts(TIES, row, count, WIDTH), axis=0)
    mass = tl.sum(_parts(MASS, row, count, WIDTH), axis=0) + ties * tl.exp(_value(tl.load(BORDERS + row)) - top)
    return tl.where(top_p < 1.0, top_p * mass, 0.0)


@triton.jit
def _count_goal(KEPT, TOP_K, row, count, WIDTH: tl.constexpr):
    """Return how many top-k leaves; 0 where it cuts nothing."""
    top_k = tl.load(TOP_K + row).to(tl.float64)
    return tl.where(top_k < tl.sum(_parts(KEPT, row, count, WIDTH), axis=0), top_k, 0.0)


@triton.jit(do_not_specialize=["number", "rows"])
def _pass(
    SCALED, TOPS, KEPT, TOP_K, MASS, BORDERS, TIES, TOP_P, LOWS, OVERS, FOUND, number, rows, vocab,
    BY_MASS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Pass `number`: narrow the range by the pass before, then count or weigh what of a part is above eight thresholds."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    count = tl.num_programs(1)
    top = _top(TOPS, row, count, WIDTH)
    if BY_MASS:
        goal = _goal(MASS, BORDERS, TIES, TOPS, TOP_P, row, count, WIDTH)
    else:
        goal = _count_goal(KEPT, TOP_K, row, count, WIDTH)
    low, over = _so_far(LOWS, OVERS, FOUND, goal, row, rows, number, count, WIDTH)
    here = number * rows + row
    if part == 0:
        tl.store(LOWS + here, low)
        tl.store(OVERS + here, over)
    shift = (30 - 3 * number).to(tl.int64)
    threshold = tl.arange(0, 8)[None, :]
    total = tl.zeros((TILE, 8), tl.float64)
    if goal > 0:
        for begin in range(part * PART, min((part + 1) * PART, vocab), TILE):
            token = begin + tl.arange(0, TILE)
            values = tl.load(SCALED + row.to(tl.int64) * vocab + token, mask=token < vocab, other=float("-inf"))
            # Thresholds below a value; those of values above the range are counted already.
            below = (_keys(values).to(tl.int64) - low) >> shift
            inside = (below > 0) & (below < 8) & (token < vocab)
            if tl.max(inside.to(tl.int32), axis=0) > 0:
                weight = tl.full((TILE,), 1.0, tl.float64)
                if BY_MASS:
                    weight = tl.exp(values.to(tl.float64) - top)
                counted = tl.where(inside, below, 0).to(tl.int32)
                total += tl.where(threshold < counted[:, None], weight[:, None], 0.0)
    tl.store(FOUND + (here * count + part) * 8 + tl.arange(0, 8), tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["rows"])
def _mass(
    SCALED, TOPS, KEPT, LEAST, TOP_K, LOWS, OVERS, FOUND, BORDERS, TIES, MASS, rows, vocab, PASSES: tl.constexpr,
    BY_K: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The border that min-p and top-k leave, how many ties stay there, and what mass of every part is above it."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    count = tl.num_programs(1)
    top = _top(TOPS, row, count, WIDTH)
    at = tl.arange(0, WIDTH)
    key = _keys(tl.min(tl.load(LEAST + row * count + at, mask=at < count, other=float("inf")), axis=0))
    goal = 0.0
    over = tl.full((), 0.0, tl.float64)
    if BY_K:
        goal = _count_goal(KEPT, TOP_K, row, count, WIDTH)
        low, over = _so_far(LOWS, OVERS, FOUND, goal, row, rows, PASSES, count, WIDTH)
        key = tl.where(goal > 0, low.to(tl.int32), key)
    mass = tl.full((), 0.0, tl.float64)
    ties = tl.full((), 0, tl.int32)
    for begin in range(part * PART, min((part + 1) * PART, vocab), TILE):
        token = begin + tl.arange(0, TILE)
        values = tl.load(SCALED + row.to(tl.int64) * vocab + token, mask=token < vocab, other=float("nan"))
        keys = tl.where(token < vocab, _keys(values), -2147483648)
        weight = tl.exp(values.to(tl.float64) - top)
        mass += tl.sum(tl.where((keys > key) & (token < vocab), weight, 0.0), axis=0)
        ties += tl.sum(((keys == key) & (token < vocab)).to(tl.int32), axis=0)
    stay = ties.to(tl.float64)
    if BY_K:
        # Top-k counts its ties over the whole row; they stand in the first part.
        stay = tl.where(goal > 0, tl.where(part == 0, goal - over, 0.0), stay)
    tl.store(MASS + row * count + part, mass)
    tl.store(TIES + row * count + part, stay)
    if part == 0:
        tl.store(BORDERS + row, key)


@triton.jit(do_not_specialize=["rows"])
def _finish(
    SCALED, TOPS, MASS, BORDERS, TIES, TOP_P, LOWS, OVERS, FOUND, BORDER, LAST, rows, vocab, count,
    PASSES: tl.constexpr, BY_P: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The border of everything, and the last of its ties that stays."""
    row = tl.program_id(0)
    key = tl.load(BORDERS + row)
    ties = tl.sum(_parts(TIES, row, count, WIDTH), axis=0)
    if BY_P:
        goal = _goal(MASS, BORDERS, TIES, TOPS, TOP_P, row, count, WIDTH)
        low, over = _so_far(LOWS, OVERS, FOUND, goal, row, rows, PASSES, count, WIDTH)
        # Sums of another order may miss the least of what is there.
        if (goal > 0) & (low >= key.to(tl.int64)):
            nucleus = low.to(tl.int32)
            needed = tl.ceil((goal - over) / tl.exp(_value(nucleus) - _top(TOPS, row, count, WIDTH)))
            needed = tl.maximum(needed, 1.0)
            ties = tl.where(nucleus == key, tl.minimum(needed, ties), needed)
            key = nucleus
    seen = tl.full((), 0.0, tl.float64)
    last = tl.full((), 0, tl.int32)
    for begin in range(0, vocab, TILE):
        token = begin + tl.arange(0, TILE)
        values = tl.load(SCALED + row.to(tl.int64) * vocab + token, mask=token < vocab, other=float("nan"))
        equal = ((_keys(values) == key) & (token < vocab)).to(tl.int32)
        found = tl.sum(equal, axis=0)
        if (found > 0) & (seen < ties):
            rank = seen + tl.cumsum(equal, axis=0).to(tl.float64)
            last = tl.max(tl.where((equal == 1) & (rank <= ties), token, 0), axis=0)
            seen += found.to(tl.float64)
    tl.store(BORDER + row, _value(key))
    tl.store(LAST + row, last.to(tl.int64))


def sample_border(
    scaled: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    by_k: bool,
    by_p: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (border float64 [r], last int64 [r]): what min-p, top-k and top-p leave are the values above the border,
    and those equal to it whose id is not above `last`.

    `scaled` float32 [r, vocab] contiguous; `log_min_p` float64 [r], -inf: off; `top_k` int64 [r], 0: off; `top_p`
    float64 [r], 1: off. They apply in this order; of equals the lowest ids stay. `by_k`, `by_p`: whether any row has a
    top-k, a top-p.
    """
    rows, vocab = scaled.shape
    device, parts = scaled.device, triton.cdiv(vocab, _PART)
    border = torch.empty(rows, dtype=torch.float64, device=device)
    last = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return border, last
    tops, least = torch.empty(2, rows, parts, dtype=torch.float32, device=device)
    kept, mass, ties = torch.empty(3, rows, parts, dtype=torch.float64, device=device)
    borders = torch.empty(rows, dtype=torch.int32, device=device)
    lows = torch.empty(_PASSES, rows, dtype=torch.int64, device=device)
    overs = torch.empty(_PASSES, rows, dtype=torch.float64, device=device)
    found = torch.empty(_PASSES, rows, parts, 8, dtype=torch.float64, device=device)
    grid, width = (rows, parts), triton.next_power_of_2(parts)
    shared = (tops, kept, top_k, mass, borders, ties, top_p, lows, overs, found)
    sizes = {"TILE": _TILE, "PART": _PART, "WIDTH": width, "num_warps": 8}
    _tops[grid](scaled, tops, vocab, PART=_PART, num_warps=8)
    _kept[grid](scaled, tops, log_min_p, kept, least, vocab, WIDTH=width, PART=_PART, num_warps=8)
    for number in range(_PASSES if by_k else 0):
        _pass[grid](scaled, *shared, number, rows, vocab, BY_MASS=False, **sizes)
    _mass[grid](
        scaled, tops, kept, least, top_k, lows, overs, found, borders, ties, mass, rows, vocab, PASSES=_PASSES,
        BY_K=by_k, **sizes,
    )  # fmt: skip
    for number in range(_PASSES if by_p else 0):
        _pass[grid](scaled, *shared, number, rows, vocab, BY_MASS=True, **sizes)
    _finish[(rows,)](
        scaled, tops, mass, borders, ties, top_p, lows, overs, found, border, last, rows, vocab, parts,
        PASSES=_PASSES, BY_P=by_p, TILE=2 * _TILE, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return border, last
