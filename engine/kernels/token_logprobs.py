# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Log-probabilities of the tokens chosen and of the best ones, from raw logits: the best are found among the few ids
that reach what many groups of ids reach, and taken out of them one by one.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.best_ids import Shape, gather_best, groups_of, key_of
from engine.kernels.launch import cdiv, kernel, next_power_of_2

EMPTY = tl.constexpr(-0x8000000000000000)
"""Below everything that `_packed` returns."""
LOW_BITS = tl.constexpr(0x7FFFFFFF)


def shape_of(vocab: int, count: int) -> Shape:
    """Return the shape for the best `count` of `vocab` ids."""
    room = max(512, next_power_of_2(4 * count))
    shape = Shape(best=max(count, 64), room=room)
    return shape._replace(best=max(1, count, min(shape.best, groups_of(vocab, shape) // 2)))


@triton.jit
def _packed(raw, token):
    """Return int64 of one total order: logit ascending, token descending."""
    return ((key_of(raw).to(tl.int64) - 0x80000000) << 32) | (token ^ LOW_BITS).to(tl.int64)


@kernel
def _finish(
    LOGITS, AT, TOKENS, TOP, COUNT, VALUES, IDS, MASS, OUT, BEST, vocab, row_stride, parts, best,
    ROOM: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = LOGITS + tl.load(AT + row) * row_stride
    part = tl.arange(0, PARTS)
    mass = tl.sum(tl.load(MASS + row * parts + part, mask=part < parts, other=0.0), axis=0)
    total = tl.load(TOP + row) + tl.log(mass)
    out = OUT + row * (best + 1)
    tl.store(out, (tl.load(logits + tl.load(TOKENS + row)).to(tl.float64) - total).to(tl.float32))
    gathered = tl.load(COUNT + row)
    whole = (gathered < best) | (gathered > ROOM)
    place = tl.arange(0, ROOM)
    raw = tl.load(VALUES + row * ROOM + place, mask=place < gathered, other=float("-inf"))
    token = tl.load(IDS + row * ROOM + place, mask=place < gathered, other=0)
    rest = tl.where((place < gathered) & (whole == 0), _packed(raw, token), EMPTY)
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for i in range(best):
        most = tl.max(rest, axis=0)
        if whole:
            # Many equal values, or fewer than are wanted: look at the whole row for what comes next.
            next_ones = tl.full((TILE,), EMPTY, tl.int64)
            for begin in range(0, vocab, TILE):
                at = begin + tl.arange(0, TILE)
                ahead = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
                packed = _packed(ahead, at)
                next_ones = tl.maximum(next_ones, tl.where((packed < last) & (at < vocab), packed, EMPTY))
            most = tl.max(next_ones, axis=0)
        last = most
        rest = tl.where(rest == most, EMPTY, rest)
        found = (most & LOW_BITS) ^ LOW_BITS
        tl.store(BEST + row * best + i, found)
        tl.store(out + 1 + i, (tl.load(logits + found).to(tl.float64) - total).to(tl.float32))


def token_logprobs(
    logits: torch.Tensor, at: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [n, 1 + count], natural logs of the probabilities of `tokens` and of the best ids, and int64
    [n, count]: which are best, most likely first, of equals the lowest id. `count` is vocab at most.

    `logits` float32 [m, vocab], rows dense; `at` int64 [n]: rows; `tokens` int64 [n]: ids. Sums are in float64.
    """
    rows, vocab, device = at.shape[0], logits.shape[1], logits.device
    count = min(count, vocab)
    out = torch.empty(rows, 1 + count, dtype=torch.float32, device=device)
    best = torch.empty(rows, count, dtype=torch.int64, device=device)
    if rows:
        shape = shape_of(vocab, count)
        found = gather_best(logits, at, None, shape)
        parts = cdiv(vocab, shape.part)
        _finish[(rows,)](
            logits, at, tokens, found.top, found.count, found.values, found.ids, found.mass, out, best,
            vocab, logits.stride(0), parts, count,
            ROOM=shape.room, PARTS=next_power_of_2(parts), TILE=1024, num_warps=4,
        )  # fmt: skip
    return out, best
