# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Token choice (decision A20) where the logits are: argmax of scaled logit plus counter-based noise, for every row.

A greedy row compares raw values as they are. Others get noise in float32 first, which is nearly right: if one token is
the best of its part beyond doubt, only its own noise is computed in float64, else that of the whole part. What is chosen
is what float64 throughout would choose.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.philox import GUMBEL_MAX
from engine.sampling import GREEDY_BELOW

_GUMBEL_MIN = -2.82
"""No noise is below this."""
NONE = tl.constexpr(2147483647)


class Shape(NamedTuple):
    """What a launcher may choose."""

    part: int
    """Tokens a program looks at."""
    tile: int
    """In one go."""
    warps: int


def shape_of() -> Shape:
    """Return the shape for all sizes."""
    return Shape(8192, 1024, 4)


@triton.jit
def _words(group, seed, position, sample):
    """Return the 23 random bits, int32 [4 n], of the tokens of int32 groups [n], in their order."""
    w0, w1, w2, w3 = tl.philox(seed, position, sample, group, tl.zeros_like(group))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * group.shape[0],))
    return (words.to(tl.uint32, bitcast=True) >> 9).to(tl.int32)


@triton.jit
def _noise(words):
    """Return float64 Gumbel noise."""
    return -tl.log(-tl.log((words.to(tl.float64) + 0.5) * 1.1920928955078125e-07))


@triton.jit
def _near_noise(words):
    """Return float32 Gumbel noise to 2e-5: fast logarithms, and a series where they are bad, next to one."""
    from_one = (8388607.5 - words.to(tl.float32)) * 1.1920928955078125e-07
    series = from_one * (1 + from_one * (0.5 + from_one * (0.33333334 + from_one * (0.25 + from_one * 0.2))))
    log = tl.where(from_one < 0.0625, series, -tl.log((words.to(tl.float32) + 0.5) * 1.1920928955078125e-07))
    return -tl.log(log)


@triton.jit
def _allowed(LOGITS_AT, token, vocab, divisor, border, last):
    """Return scaled logits in their own type; -inf: may not be chosen."""
    raw = tl.load(LOGITS_AT + token, mask=token < vocab, other=float("-inf"))
    values = tl.div_rn(raw, tl.broadcast_to(divisor, raw.shape)) if raw.dtype == tl.float32 else raw / divisor
    return tl.where((values > border) | ((values == border) & (token <= last)), values, float("-inf"))


@triton.jit
def _highest(logits, begin, vocab, TILE: tl.constexpr, PART: tl.constexpr):
    """Return the highest of a part, and its lowest token: nothing but comparisons in the logits' own type."""
    lane = begin + tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), logits.dtype.element_ty)
    token = lane
    for i in tl.static_range(PART // TILE):
        at = lane + i * TILE
        raw = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        token = tl.where(raw > best, at, token)
        best = tl.maximum(best, raw)
    most = tl.max(best, axis=0)
    return most.to(tl.float64), tl.min(tl.where(best == most, token, NONE), axis=0)


@triton.jit
def _exactly(logits, begin, vocab, divisor, border, last, seed, position, sample,
    TILE: tl.constexpr, PART: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Return the highest scaled logit plus noise of a part, and its lowest token; all sums in float64."""
    best = tl.full((), float("-inf"), tl.float64)
    chosen = begin
    for tile in range(begin, min(begin + PART, vocab), TILE):
        token = tile + tl.arange(0, TILE)
        values = _allowed(logits, token, vocab, divisor, border, last).to(tl.float64)
        if tl.max(values, axis=0) + HIGH > best:
            values += _noise(_words(tile // 4 + tl.arange(0, TILE // 4), seed, position, sample))
            most = tl.max(values, axis=0)
            first = tl.min(tl.where(values == most, token, NONE), axis=0)
            chosen = tl.where(most > best, first, chosen)
            best = tl.maximum(best, most)
    return best, chosen


@triton.jit
def _nearly(logits, begin, vocab, divisor, border, last, seed, position, sample,
    TILE: tl.constexpr, PART: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Return what `_exactly` returns with a best to about 1e-4, and how many tokens may be it."""
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    second = tl.full((TILE,), float("-inf"), tl.float32)
    chosen = begin + lane
    reached = tl.full((), float("-inf"), tl.float32)
    for tile in range(begin, min(begin + PART, vocab), TILE):
        token = tile + lane
        values = _allowed(logits, token, vocab, divisor, border, last)
        most = tl.max(values, axis=0)
        if (most > float("-inf")) & (most + HIGH >= reached):
            values += _near_noise(_words(tile // 4 + tl.arange(0, TILE // 4), seed, position, sample))
            chosen = tl.where(values > best, token, chosen)
            second = tl.maximum(second, tl.minimum(values, best))
            best = tl.maximum(best, values)
            reached = tl.maximum(reached, most + LOW - tl.abs(most) * 9.5367431640625e-07)
    most = tl.max(best, axis=0)
    bound = most - 2e-4 - tl.abs(most) * 9.5367431640625e-07
    rivals = tl.sum((best >= bound).to(tl.int32) + (second >= bound).to(tl.int32), axis=0)
    return most, tl.min(tl.where(best == most, chosen, NONE), axis=0), rivals


@kernel
def _sample_parts(
    LOGITS, TEMPERATURE, SEED, POSITION, SAMPLE, BORDER, LAST, BEST, CHOSEN, vocab, row_stride,
    TILE: tl.constexpr, PART: tl.constexpr, GREEDY: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits = LOGITS + row.to(tl.int64) * row_stride
    begin = part * PART
    temperature = tl.load(TEMPERATURE + row)
    best = tl.full((), float("-inf"), tl.float64)
    chosen = begin
    if temperature < GREEDY:
        best, chosen = _highest(logits, begin, vocab, TILE, PART)
    else:
        divisor = temperature.to(LOGITS.dtype.element_ty)
        seed = tl.load(SEED + row)
        position = tl.load(POSITION + row).to(tl.int32)
        sample = tl.load(SAMPLE + row).to(tl.int32)
        # Compared in the logits' type: a border between two of its values has one of them behind it, whole.
        wide = tl.load(BORDER + row)
        border = wide.to(LOGITS.dtype.element_ty)
        rounded = tl.where(border.to(tl.float64) > wide, NONE, -1)
        last = tl.where(border.to(tl.float64) == wide, tl.load(LAST + row).to(tl.int32), rounded)
        rivals = tl.full((), 2, tl.int32)
        if LOGITS.dtype.element_ty == tl.float32:
            near, chosen, rivals = _nearly(
                logits, begin, vocab, divisor, border, last, seed, position, sample, TILE, PART, HIGH, LOW
            )
            if near == float("-inf"):
                rivals = 0
        if rivals > 1:
            best, chosen = _exactly(
                logits, begin, vocab, divisor, border, last, seed, position, sample, TILE, PART, HIGH
            )
        elif rivals == 1:
            token = chosen // 4 * 4 + tl.arange(0, 4)
            values = _allowed(logits, token, vocab, divisor, border, last).to(tl.float64)
            values += _noise(_words(chosen // 4 + tl.arange(0, 1), seed, position, sample))
            best = tl.max(tl.where(token == chosen, values, float("-inf")), axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(BEST + at, best)
    tl.store(CHOSEN + at, chosen)


@kernel
def _sample_best(BEST, CHOSEN, OUT, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, WIDTH)
    best = tl.load(BEST + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    chosen = tl.load(CHOSEN + row * PARTS + part, mask=part < PARTS, other=NONE)
    most = tl.max(best, axis=0)
    tl.store(OUT + row, tl.min(tl.where(best == most, chosen, NONE), axis=0).to(tl.int64))


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    sample: torch.Tensor,
    border: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """Return int64 [m]: of `logits` [m, vocab] (float32 or float64, rows dense) the argmax with noise, lowest id first.

    `temperature` float64 [m], below 1e-5: no noise and no border. `seed` (64 bits), `position`, `sample` int64 [m] are
    the noise's counter. Ids may be chosen whose scaled logit is above `border` float64 [m], or equal to it while the id
    is not above `last` int64 [m]; -inf and vocab: all.
    """
    rows, vocab = logits.shape
    shape = shape_of()
    parts = cdiv(vocab, shape.part)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    chosen = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    assert logits.stride(1) == 1
    if rows:
        _sample_parts[(rows, parts)](
            logits, temperature, seed, position, sample, border, last, best, chosen, vocab, logits.stride(0),
            TILE=shape.tile, PART=shape.part, GREEDY=GREEDY_BELOW, HIGH=GUMBEL_MAX + 1e-3, LOW=_GUMBEL_MIN,
            num_warps=shape.warps,
        )  # fmt: skip
        _sample_best[(rows,)](best, chosen, out, PARTS=parts, WIDTH=next_power_of_2(parts), num_warps=1)
    return out
