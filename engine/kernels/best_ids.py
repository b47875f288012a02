# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The ids of the highest logits of rows, gathered without sorting: some more than asked for, in any order.

A row is read twice. The best of every group of ids give a value that many ids reach but few more; those are gathered,
while the mass of all is summed. Logits are compared as unsigned integers of the same order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(0x00800000)
"""Key of the lowest finite float32."""


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
    part: int = 4096
    """Ids of a program that gathers."""
    first_warps: int = 4
    begin_warps: int = 8
    gather_warps: int = 8


class Gathered(NamedTuple):
    """Of r rows: what reached the value, and what was summed on the way."""

    top: torch.Tensor  # float64 [r], the highest scaled logit
    reached: torch.Tensor  # uint32 [r], key of the value
    floor: torch.Tensor  # uint32 [r], the lowest key that min-p leaves
    count: torch.Tensor  # int32 [r], how many reached it; above `room`: not all of them are here
    keys: torch.Tensor  # uint32 [r, room]
    ids: torch.Tensor  # int32 [r, room]
    left: torch.Tensor  # int32 [r, parts], how many keys are not below the floor
    low: torch.Tensor  # uint32 [r, parts], the lowest of them; 0xffffffff if there is none
    mass: torch.Tensor  # float64 [r, parts], the sum of e^(value - top) of them; 0 where nobody needs it


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
def scaled_keys(logits, token, vocab, TEMPERATURE, PLAIN: tl.constexpr):
    """Return the keys of int32 ids [n] of a row of logits, divided by a float64 temperature unless PLAIN."""
    raw = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    if PLAIN:
        return key_of(raw)
    else:
        return key_of(tl.div_rn(raw, tl.broadcast_to(tl.load(TEMPERATURE).to(tl.float32), raw.shape)))


@triton.jit
def largest_key(key, weight, goal, BITS: tl.constexpr):
    """Return the largest uint32 c for which the int64 weights of keys >= c sum to `goal` at least; keys have BITS."""
    found = tl.full((), 0, tl.uint32)
    for step in tl.static_range(BITS // 2):
        unit = tl.full((), 1 << (BITS - 2 - 2 * step), tl.uint32)
        one = tl.sum(tl.where(key >= found + unit, weight, 0), axis=0)
        two = tl.sum(tl.where(key >= found + unit + unit, weight, 0), axis=0)
        three = tl.sum(tl.where(key >= found + unit + unit + unit, weight, 0), axis=0)
        up = (one >= goal).to(tl.uint32) + (two >= goal).to(tl.uint32) + (three >= goal).to(tl.uint32)
        found += up * unit
    return found


@triton.jit
def append(COUNT, KEYS, IDS, row, key, token, chosen, ROOM: tl.constexpr):
    """Put chosen keys and ids behind those that a row has; counts what has no room, too. Their order is any."""
    each = chosen.to(tl.int32)
    place = tl.cumsum(each, axis=0) - each + tl.atomic_add(COUNT + row, tl.sum(each, axis=0))
    tl.store(KEYS + row * ROOM + place, key, mask=chosen & (place < ROOM))
    tl.store(IDS + row * ROOM + place, token, mask=chosen & (place < ROOM))


@triton.jit
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


@triton.jit
def _begin(
    BEST, TEMPERATURE, LOG_MIN_P, TOP, REACHED, FLOOR, COUNT, groups,
    K: tl.constexpr, GROUPS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    key = scaled_keys(BEST + row * groups, group, groups, TEMPERATURE + row, PLAIN)
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
    tl.store(TOP + row, top)
    tl.store(REACHED + row, largest_key(key, tl.full((GROUPS,), 1, tl.int64), K, 32))
    tl.store(FLOOR + row, low.to(tl.uint32))
    tl.store(COUNT + row, 0)


@triton.jit
def _gather(
    LOGITS, AT, TEMPERATURE, TOP_K, TOP_P, TOP, REACHED, FLOOR, COUNT, KEYS, IDS, LEFT, LOW, MASS, vocab, row_stride,
    K: tl.constexpr, ROOM: tl.constexpr, PART: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    key = scaled_keys(LOGITS + tl.load(AT + row) * row_stride, token, vocab, TEMPERATURE + row, PLAIN)
    floor = tl.load(FLOOR + row)
    reached = tl.load(REACHED + row)
    append(COUNT, KEYS, IDS, row, key, token, (key >= reached) & (key >= floor), ROOM)
    at = row * tl.num_programs(1) + part
    left = key >= floor
    weigh = floor > 0
    if not PLAIN:
        tl.store(LEFT + at, tl.sum(left.to(tl.int32), axis=0))
        tl.store(LOW + at, tl.min(tl.where(left, key, 0xFFFFFFFF).to(tl.uint32), axis=0))
        top_k = tl.load(TOP_K + row)
        # Rows whose ids are all gathered, or the best k of them, need no mass of the others.
        weigh = (tl.load(TOP_P + row) < 1) & (reached > floor) & ((top_k <= 0) | (top_k > K))
    mass = tl.full((), 0, tl.float64)
    if weigh:
        mass = tl.sum(tl.where(left, weight_of(key, tl.load(TOP + row)), 0.0), axis=0)
    tl.store(MASS + at, mass)


def groups_of(vocab: int, shape: Shape) -> int:
    """Return how many groups have an id at least."""
    whole, rest = divmod(vocab, shape.reach)
    return whole * (shape.width // shape.fold) + triton.cdiv(min(rest, shape.width), shape.fold)


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
    reaches, parts = triton.cdiv(vocab, shape.reach), triton.cdiv(vocab, shape.part)
    groups = reaches * (shape.width // shape.fold)
    best = torch.empty(rows, groups, dtype=torch.float32, device=device)
    f64 = [torch.empty(n, dtype=torch.float64, device=device) for n in (rows, rows * parts)]
    u32 = [torch.empty(n, dtype=torch.uint32, device=device) for n in (rows, rows, rows * parts, rows * shape.room)]
    i32 = [torch.empty(n, dtype=torch.int32, device=device) for n in (rows, rows * parts, rows * shape.room)]
    found = Gathered(f64[0], u32[0], u32[1], i32[0], u32[3], i32[2], i32[1], u32[2], f64[1])
    temperature, log_min_p, top_k, top_p = rules if rules is not None else (at, at, at, at)
    plain, stride = rules is None, logits.stride(0)
    _best_of_groups[(rows, reaches)](
        logits, at, best, vocab, stride, REACH=shape.reach, WIDTH=shape.width, FOLD=shape.fold,
        num_warps=shape.first_warps,
    )  # fmt: skip
    _begin[(rows,)](
        best, temperature, log_min_p, found.top, found.reached, found.floor, found.count, groups,
        K=shape.best, GROUPS=triton.next_power_of_2(groups), PLAIN=plain, num_warps=shape.begin_warps,
    )  # fmt: skip
    _gather[(rows, parts)](
        logits, at, temperature, top_k, top_p, *found, vocab, stride,
        K=shape.best, ROOM=shape.room, PART=shape.part, PLAIN=plain, num_warps=shape.gather_warps,
    )  # fmt: skip
    return found
