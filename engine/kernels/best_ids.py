# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The ids of the highest logits of rows, gathered without sorting: some more than asked for, in any order.

A row is read twice. The best of every group of ids give a value that many ids reach but few more; those are gathered,
while the mass of all is summed. Logits are compared as unsigned integers of the same order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.launch import cdiv, kernel, next_power_of_2

LOWEST = tl.constexpr(0x00800000)
"""Key of the lowest finite float32."""
INFINITE = tl.constexpr(0xFF800000)


class Shape(NamedTuple):
    """What launchers may choose."""

    best: int
    """The rank, among the groups' best, of the value that ids must reach to be gathered."""
    room: int
    """For how many a row."""
    reach: int = 8192
    """Ids whose groups' best a program of the first kernel finds."""
    width: int = 1024
    """Ids that it looks at in one go."""
    fold: int = 8
    """Neighbours among those that are of one group: a group has `reach // width * fold` ids."""
    part: int = 8192
    """Ids of a program that gathers."""
    tile: int = 1024
    """Ids that it looks at in one go."""
    first_warps: int = 4
    begin_warps: int = 8
    gather_warps: int = 4


class Gathered(NamedTuple):
    """Of r rows: what reached the value, and what was summed on the way."""

    top: torch.Tensor  # float64 [r], the highest scaled logit
    reached: torch.Tensor  # uint32 [r], key of the scaled value
    floor: torch.Tensor  # uint32 [r], the lowest key that min-p leaves
    raw: torch.Tensor  # float32 [r, 2], the lowest logits that min-p leaves, and that are gathered
    count: torch.Tensor  # int32 [r], how many reached both; above `room`: not all of them are here
    values: torch.Tensor  # float32 [r, room], their logits
    ids: torch.Tensor  # int32 [r, room]
    left: torch.Tensor  # int32 [r, parts], how many min-p leaves
    low: torch.Tensor  # float32 [r, parts], the lowest logit of them; inf if there is none
    mass: torch.Tensor  # float64 [r, parts], the sum of e^(scaled - top) of them; 0 where nobody needs it


@triton.jit
def key_of(value):
    """Return uint32 that order as float32 values do, 0 for -inf; both zeros are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(value > float("-inf"), flipped, 0).to(tl.uint32, bitcast=True)


@triton.jit
def value_of(key):
    """Return float32 of keys."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(key, top):
    """Return float64 e^(value - top)."""
    return tl.exp(value_of(key).to(tl.float64) - top)


@triton.jit
def scaled_keys(raw, temperature):
    """Return the keys of logits [n], divided by a float32 temperature."""
    return key_of(tl.div_rn(raw, tl.broadcast_to(temperature, raw.shape)))


@triton.jit
def raw_of(key, temperature):
    """Return the lowest logits [n] whose scaled keys reach each of `key` [n]."""
    near = key_of(value_of(key) * temperature).to(tl.int64)
    low, high = near - 8, near + 8
    # Rounding moves it by a step or two; around zero, where quotients vanish, by any number.
    sure = (scaled_keys(value_of(low.to(tl.uint32)), temperature) < key) & (high <= INFINITE)
    sure &= scaled_keys(value_of(high.to(tl.uint32)), temperature) >= key
    low = tl.where(sure, low, LOWEST).to(tl.int64)
    high = tl.where(sure, high, INFINITE).to(tl.int64)
    for _step in range(tl.max(tl.where(sure, 5, 32), axis=0)):
        middle = (low + high) >> 1
        reaches = scaled_keys(value_of(middle.to(tl.uint32)), temperature) >= key
        high = tl.where(reaches, middle, high)
        low = tl.where(reaches | (low >= high), low, middle + 1)
    return value_of(high.to(tl.uint32))


@triton.jit
def _add3(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def largest_key(key, weight, goal, BITS: tl.constexpr, STEPS: tl.constexpr):
    """Return the largest uint32 c for which the int64 weights of keys >= c sum to `goal` at least; keys have BITS.

    Two bits a step; with less than BITS // 2 steps c has zeros behind.
    """
    found = tl.full((), 0, tl.uint32)
    for step in range(STEPS):
        unit = tl.full((), 1 << (BITS - 2), tl.uint32) >> (2 * step)
        one = tl.where(key >= found + unit, weight, 0)
        two = tl.where(key >= found + unit + unit, weight, 0)
        three = tl.where(key >= found + unit + unit + unit, weight, 0)
        one, two, three = tl.reduce((one, two, three), 0, _add3)
        up = (one >= goal).to(tl.uint32) + (two >= goal).to(tl.uint32) + (three >= goal).to(tl.uint32)
        found += up * unit
    return found


@triton.jit
def append(COUNT, VALUES, IDS, row, value, token, chosen, ROOM: tl.constexpr):
    """Put chosen logits and ids behind those that a row has; counts what has no room, too. Their order is any."""
    # Few are chosen: an atomic each costs less than a scan of all.
    place = tl.atomic_add(COUNT + row + tl.zeros_like(token), 1, mask=chosen, sem="relaxed")
    tl.store(VALUES + row * ROOM + place, value, mask=chosen & (place < ROOM))
    tl.store(IDS + row * ROOM + place, token, mask=chosen & (place < ROOM))


@kernel
def _best_of_groups(LOGITS, AT, BEST, vocab, row_stride, REACH: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits = LOGITS + tl.load(AT + row) * row_stride
    lane = part * REACH + tl.arange(0, WIDTH)
    best = tl.full((WIDTH,), float("-inf"), tl.float32)
    for i in tl.static_range(REACH // WIDTH):
        token = lane + i * WIDTH
        best = tl.maximum(best, tl.load(logits + token, mask=token < vocab, other=float("-inf")))
    of_group = tl.max(tl.reshape(best, (WIDTH // FOLD, FOLD)), axis=1)
    groups: tl.constexpr = WIDTH // FOLD
    tl.store(BEST + (row * tl.num_programs(1) + part) * groups + tl.arange(0, groups), of_group)


@kernel
def _begin(
    BEST, TEMPERATURE, LOG_MIN_P, TOP, REACHED, FLOOR, RAW, COUNT, groups,
    K: tl.constexpr, GROUPS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    raw = tl.load(BEST + row * groups + group, mask=group < groups, other=float("-inf"))
    temperature = tl.full((), 1.0, tl.float32)
    if not PLAIN:
        temperature = tl.load(TEMPERATURE + row).to(tl.float32)
    key = scaled_keys(raw, temperature)
    most = tl.max(key, axis=0)
    top = value_of(most).to(tl.float64)
    low = tl.full((), LOWEST, tl.int64)
    if not PLAIN:
        log_min_p = tl.load(LOG_MIN_P + row)
        if log_min_p > float("-inf"):
            # By halves, so that it is exact: a rounded sum of top and log_min_p is not.
            high = tl.maximum(most.to(tl.int64), low)
            for _step in range(32):
                middle = (low + high) >> 1
                left = value_of(middle.to(tl.uint32)).to(tl.float64) - top >= log_min_p
                high = tl.where(left, middle, high)
                low = tl.where(left | (low >= high), low, middle + 1)
            low = high
    # Any value that some groups reach would do: its last bits are left out.
    reached = tl.maximum(largest_key(key, tl.full((GROUPS,), 1, tl.int64), K, 32, 10), LOWEST)
    floor = low.to(tl.uint32)
    both = tl.arange(0, 2)
    bounds = tl.where(both == 0, floor, tl.maximum(floor, reached)).to(tl.uint32)
    tl.store(RAW + 2 * row + both, raw_of(bounds, temperature))
    tl.store(TOP + row, top)
    tl.store(REACHED + row, reached)
    tl.store(FLOOR + row, floor)
    tl.store(COUNT + row, 0)


@kernel
def _gather(
    LOGITS, AT, TEMPERATURE, TOP_K, TOP_P, TOP, REACHED, FLOOR, RAW, COUNT, VALUES, IDS, LEFT, LOW, MASS,
    vocab, row_stride,
    K: tl.constexpr, ROOM: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits = LOGITS + tl.load(AT + row) * row_stride
    token = part * PART + tl.arange(0, TILE)
    raw = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    top = tl.load(TOP + row)
    floor, bound = tl.load(RAW + 2 * row), tl.load(RAW + 2 * row + 1)
    temperature = tl.full((), 1.0, tl.float32)
    weigh = bound >= floor
    if not PLAIN:
        temperature = tl.load(TEMPERATURE + row).to(tl.float32)
        # Rows whose ids are all gathered, or the best k of them, need no mass of the others.
        top_k = tl.load(TOP_K + row)
        fewer = tl.load(REACHED + row) > tl.load(FLOOR + row)
        weigh = (tl.load(TOP_P + row) < 1) & fewer & ((top_k <= 0) | (top_k > K))
    left = tl.zeros((TILE,), tl.int32)
    low = tl.full((TILE,), float("inf"), tl.float32)
    mass = tl.zeros((TILE,), tl.float64)
    for i in range(PART // TILE):
        ahead = token + TILE
        following = tl.load(logits + ahead, mask=(ahead < vocab) & (i + 1 < PART // TILE), other=float("-inf"))
        append(COUNT, VALUES, IDS, row, raw, token, raw >= bound, ROOM)
        if weigh:
            scaled = raw if PLAIN else tl.div_rn(raw, tl.broadcast_to(temperature, raw.shape))
            mass += tl.where(raw >= floor, tl.exp(scaled.to(tl.float64) - top), 0.0)
        if not PLAIN:
            left += (raw >= floor).to(tl.int32)
            low = tl.minimum(low, tl.where(raw >= floor, raw, float("inf")))
        token = ahead
        raw = following
    at = row * tl.num_programs(1) + part
    tl.store(MASS + at, tl.sum(mass, axis=0))
    if not PLAIN:
        tl.store(LEFT + at, tl.sum(left, axis=0))
        tl.store(LOW + at, tl.min(low, axis=0))


def groups_of(vocab: int, shape: Shape) -> int:
    """Return how many groups have an id at least."""
    whole, rest = divmod(vocab, shape.reach)
    return whole * (shape.width // shape.fold) + cdiv(min(rest, shape.width), shape.fold)


def gather_best(
    logits: torch.Tensor, at: torch.Tensor, rules: tuple[torch.Tensor, ...] | None, shape: Shape
) -> Gathered:
    """Gather of rows `at` int64 [r] of float32 `logits` [m, vocab], rows dense.

    `rules` float64 temperature, float64 log of min-p, int64 top-k, float64 top-p [r]: what is below min-p's floor is not
    gathered, and mass is only summed where these need it. None: raw logits, all of them, mass of every row.
    """
    rows, vocab, device = at.shape[0], logits.shape[1], logits.device
    assert logits.stride(1) == 1
    assert logits.dtype is torch.float32
    reaches, parts = cdiv(vocab, shape.reach), cdiv(vocab, shape.part)
    groups = reaches * (shape.width // shape.fold)
    best = torch.empty(rows, groups, dtype=torch.float32, device=device)
    top, mass = (torch.empty(n, dtype=torch.float64, device=device) for n in (rows, rows * parts))
    reached, floor = (torch.empty(rows, dtype=torch.uint32, device=device) for _ in range(2))
    raw, values, low = (torch.empty(rows * n, dtype=torch.float32, device=device) for n in (2, shape.room, parts))
    count, ids, left = (torch.empty(rows * n, dtype=torch.int32, device=device) for n in (1, shape.room, parts))
    found = Gathered(top, reached, floor, raw, count, values, ids, left, low, mass)
    temperature, log_min_p, top_k, top_p = rules if rules is not None else (at, at, at, at)
    plain, stride = rules is None, logits.stride(0)
    _best_of_groups[(rows, reaches)](
        logits, at, best, vocab, stride, REACH=shape.reach, WIDTH=shape.width, FOLD=shape.fold,
        num_warps=shape.first_warps,
    )  # fmt: skip
    _begin[(rows,)](
        best, temperature, log_min_p, top, reached, floor, raw, count, groups,
        K=shape.best, GROUPS=next_power_of_2(groups), PLAIN=plain, num_warps=shape.begin_warps,
    )  # fmt: skip
    _gather[(rows, parts)](
        logits, at, temperature, top_k, top_p, *found, vocab, stride,
        K=shape.best, ROOM=shape.room, PART=shape.part, TILE=shape.tile, PLAIN=plain, num_warps=shape.gather_warps,
    )  # fmt: skip
    return found
