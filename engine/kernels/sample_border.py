# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Which ids min-p, top-k and top-p leave of a row, without sorting it: the border is searched for among the bits of floats.

A pass over the row counts, or sums, what is above eight thresholds at once and leaves an eighth of the range; tiles that
lie below all of them cost a load and a maximum. Sums are float64.
"""

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _keys(values):
    """Return int32 in the order of float32 values; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """Return the float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(ROW, thresholds, top, vocab, MASS: tl.constexpr, TILE: tl.constexpr):
    """Return float64 [8]: how many, or what mass, of a row's keys are above int32 thresholds [8], ascending."""
    lowest = tl.min(thresholds, axis=0)
    total = tl.zeros((8,), tl.float64)
    for begin in range(0, vocab, TILE):
        token = begin + tl.arange(0, TILE)
        values = tl.load(ROW + token, mask=token < vocab, other=float("-inf"))
        keys = _keys(values)
        if tl.max(keys, axis=0) > lowest:
            weight = tl.full((TILE,), 1.0, tl.float64)
            if MASS:
                weight = tl.exp(values.to(tl.float64) - top)
            weight = tl.where(token < vocab, weight, 0.0)
            total += tl.sum(tl.where(keys[:, None] > thresholds[None, :], weight[:, None], 0.0), axis=0)
    return total


@triton.jit
def _search(ROW, goal, top, vocab, MASS: tl.constexpr, TILE: tl.constexpr):
    """Return the least key above which there is less than `goal`, int32, and how much there is above it."""
    low = tl.full((), -2147483648, tl.int64)
    at = tl.arange(0, 8)
    above = tl.full((), 0.0, tl.float64)
    for shift in range(30, -3, -3):
        step = tl.full((), 1, tl.int64) << shift
        last = tl.minimum(low + (at + 1) * step - 1, 2147483647)
        found = _above(ROW, last.to(tl.int32), top, vocab, MASS, TILE)
        enough = found >= goal
        low += tl.sum(enough.to(tl.int64), axis=0) * step
        # The first threshold that has less: what is above the answer, once steps are of one.
        above = tl.max(tl.where(enough, -1.0, found), axis=0)
    return low.to(tl.int32), above


@triton.jit
def _tie(ROW, key, number, vocab, TILE: tl.constexpr):
    """Return the id of the tie `number`, from 1, at a key; the last one there is if there are fewer."""
    seen = tl.full((), 0, tl.int32)
    chosen = tl.full((), 0, tl.int32)
    for begin in range(0, vocab, TILE):
        token = begin + tl.arange(0, TILE)
        values = tl.load(ROW + token, mask=token < vocab, other=float("nan"))
        equal = ((_keys(values) == key) & (token < vocab)).to(tl.int32)
        count = tl.sum(equal, axis=0)
        if (count > 0) & (seen < number):
            rank = seen + tl.cumsum(equal, axis=0)
            chosen = tl.max(tl.where((equal == 1) & (rank <= number), token, 0), axis=0)
            seen += count
    return chosen


@triton.jit
def _sample_border(SCALED, MIN, TOP_K, TOP_P, BORDER, LAST, vocab, TILE: tl.constexpr):
    row = tl.program_id(0)
    ROW = SCALED + row.to(tl.int64) * vocab
    most = tl.full((TILE,), float("-inf"), tl.float32)
    for begin in range(0, vocab, TILE):
        token = begin + tl.arange(0, TILE)
        most = tl.maximum(most, tl.load(ROW + token, mask=token < vocab, other=float("-inf")))
    top = tl.max(most, axis=0).to(tl.float64)
    least = tl.load(MIN + row)
    top_k = tl.load(TOP_K + row)
    top_p = tl.load(TOP_P + row)
    # What min-p leaves, compared in float64: how many, what mass, and the least.
    kept = tl.full((), 0.0, tl.float64)
    mass = tl.full((), 0.0, tl.float64)
    low = tl.full((TILE,), float("inf"), tl.float32)
    for begin in range(0, vocab, TILE):
        token = begin + tl.arange(0, TILE)
        raw = tl.load(ROW + token, mask=token < vocab, other=float("-inf"))
        values = raw.to(tl.float64)
        stays = (values - top >= least) & (token < vocab)
        low = tl.minimum(low, tl.where(stays, raw, float("inf")))
        kept += tl.sum(stays.to(tl.float64), axis=0)
        if top_p < 1.0:
            mass += tl.sum(tl.where(stays, tl.exp(values - top), 0.0), axis=0)
    key = _keys(tl.min(low, axis=0))
    ties = tl.full((), 2147483647, tl.int32)
    by_k = (top_k > 0) & (top_k < kept)
    if by_k:
        key, above = _search(ROW, top_k.to(tl.float64), top, vocab, False, TILE)
        ties = (top_k.to(tl.float64) - above).to(tl.int32)
        if top_p < 1.0:
            over = _above(ROW, key + tl.zeros((8,), tl.int32), top, vocab, True, TILE)
            mass = tl.max(over, axis=0) + ties.to(tl.float64) * tl.exp(_value(key).to(tl.float64) - top)
    if top_p < 1.0:
        goal = top_p * mass
        nucleus, above = _search(ROW, goal, top, vocab, True, TILE)
        # Sums of another order may miss the least of what is there.
        if nucleus >= key:
            needed = tl.ceil((goal - above) / tl.exp(_value(nucleus).to(tl.float64) - top))
            needed = tl.minimum(tl.maximum(needed, 1.0), 2147483647.0).to(tl.int32)
            ties = tl.where(nucleus == key, tl.minimum(needed, ties), needed)
            key = nucleus
    tl.store(BORDER + row, _value(key).to(tl.float64))
    tl.store(LAST + row, _tie(ROW, key, ties, vocab, TILE).to(tl.int64))


def sample_border(
    scaled: torch.Tensor, log_min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (border float64 [r], last int64 [r]): what min-p, top-k and top-p leave are the values above the border,
    and those equal to it whose id is not above `last`.

    `scaled` float32 [r, vocab] contiguous; `log_min_p` float64 [r], -inf: off; `top_k` int64 [r], 0: off; `top_p`
    float64 [r], 1: off. They apply in this order; of equals the lowest ids stay.
    """
    rows, vocab = scaled.shape
    border = torch.empty(rows, dtype=torch.float64, device=scaled.device)
    last = torch.empty(rows, dtype=torch.int64, device=scaled.device)
    if rows:
        _sample_border[(rows,)](scaled, log_min_p, top_k, top_p, border, last, vocab, TILE=_TILE, num_warps=8)
    return border, last
