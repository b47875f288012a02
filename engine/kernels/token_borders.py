# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""What min-p, top-k and top-p leave of rows of logits, without sorting them and without waiting for anything.

A row is read twice. The best of every group of ids give a value that many ids reach but few more: the ids that reach it
are gathered, while mass and number of all are summed. A program a row then searches among those few, by bits. Scaled
logits are compared as unsigned integers of the same order; masses among the few are integers, so that their order in
memory, which is any, changes no bit. Rows whose border is not among the few are searched for whole.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(0x00800000)
"""Key of the lowest finite float32."""
UNIT = tl.constexpr(2.0**51)
"""Of integer masses: sums of up to 2048 weights, each 1 at most, stay below 2^63."""


class Shape(NamedTuple):
    """What a launcher may choose."""

    reach: int
    """Ids whose groups' best a program of the first kernel finds."""
    width: int
    """Ids that it looks at in one go."""
    fold: int
    """Neighbours among those that are of one group: a group has `reach // width * fold` ids."""
    best: int
    """The rank, among the groups' best, of the value that ids must reach to be gathered."""
    room: int
    """For how many a row."""
    part: int
    """Ids of a program that gathers."""
    first_warps: int
    gather_warps: int
    search_warps: int
    whole_warps: int


def shape_of(vocab: int) -> Shape:
    """Return the shape for rows of `vocab` ids."""
    reach, width, fold = 8192, 1024, 8
    groups = -(-vocab // (reach // width * fold))
    best = max(1, min(1024, groups // 2))
    room = max(64, triton.next_power_of_2(2 * best))
    return Shape(reach, width, fold, best, room, 4096, 4, 8, 8, 8)


@triton.jit
def _key(value):
    """Return uint32 that order as float32 values do, 0 for -inf; both zeros are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) | -2147483648)
    return tl.where(value > float("-inf"), flipped, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key):
    """Return float32 of keys."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(key, top):
    """Return float64 e^(value - top)."""
    return tl.exp(_value(key).to(tl.float64) - top)


@triton.jit
def _largest(key, weight, goal, BITS: tl.constexpr):
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
    BEST, TEMPERATURE, LOG_MIN_P, TOP, REACHED, FLOOR, GATHERED, groups,
    K: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A row's highest scaled logit, the key that gathered ids reach, the lowest key that min-p leaves."""
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    raw = tl.load(BEST + row * groups + group, mask=group < groups, other=float("-inf"))
    temperature = tl.load(TEMPERATURE + row).to(tl.float32)
    key = _key(tl.div_rn(raw, tl.broadcast_to(temperature, (GROUPS,))))
    most = tl.max(key, axis=0)
    top = _value(most).to(tl.float64)
    log_min_p = tl.load(LOG_MIN_P + row)
    low = tl.full((), LOWEST, tl.int64)
    if log_min_p > float("-inf"):
        # By halves, so that it is exact: a rounded sum of top and log_min_p is not.
        high = tl.maximum(most.to(tl.int64), low)
        for _step in range(32):
            middle = (low + high) >> 1
            left = _value(middle.to(tl.uint32)).to(tl.float64) - top >= log_min_p
            high = tl.where(left, middle, high)
            low = tl.where(left | (low >= high), low, middle + 1)
        low = high
    tl.store(TOP + row, top)
    tl.store(REACHED + row, _largest(key, tl.full((GROUPS,), 1, tl.int64), K, 32))
    tl.store(FLOOR + row, low.to(tl.uint32))
    tl.store(GATHERED + row, 0)


@triton.jit
def _gather(
    LOGITS, AT, TEMPERATURE, TOP_K, TOP_P, TOP, REACHED, FLOOR, GATHERED, KEYS, IDS, LEFT, LOW, MASS, vocab, row_stride,
    K: tl.constexpr, ROOM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    raw = tl.load(LOGITS + tl.load(AT + row) * row_stride + token, mask=token < vocab, other=float("-inf"))
    temperature = tl.load(TEMPERATURE + row).to(tl.float32)
    key = _key(tl.div_rn(raw, tl.broadcast_to(temperature, (PART,))))
    floor = tl.load(FLOOR + row)
    reached = tl.load(REACHED + row)
    chosen = (key >= reached) & (key >= floor)
    each = chosen.to(tl.int32)
    place = tl.cumsum(each, axis=0) - each + tl.atomic_add(GATHERED + row, tl.sum(each, axis=0))
    tl.store(KEYS + row * ROOM + place, key, mask=chosen & (place < ROOM))
    tl.store(IDS + row * ROOM + place, token, mask=chosen & (place < ROOM))
    at = row * tl.num_programs(1) + part
    left = key >= floor
    tl.store(LEFT + at, tl.sum(left.to(tl.int32), axis=0))
    tl.store(LOW + at, tl.min(tl.where(left, key, 0xFFFFFFFF).to(tl.uint32), axis=0))
    top_k = tl.load(TOP_K + row)
    # Rows whose ids are all gathered, or the best k of them, need no mass of the others.
    mass = tl.full((), 0, tl.float64)
    if (tl.load(TOP_P + row) < 1) & (reached > floor) & ((top_k <= 0) | (top_k > K)):
        mass = tl.sum(tl.where(left, _weight(key, tl.load(TOP + row)), 0.0), axis=0)
    tl.store(MASS + at, mass)


@triton.jit
def _search(
    TOP_K, TOP_P, TOP, GATHERED, KEYS, IDS, LEFT, LOW, MASS, BORDER, LAST, DONE, vocab, parts,
    ROOM: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Find a row's border among the ids gathered, or say that it is not there."""
    row = tl.program_id(0)
    part = row * parts + tl.arange(0, PARTS)
    real = tl.arange(0, PARTS) < parts
    left = tl.sum(tl.load(LEFT + part, mask=real, other=0).to(tl.int64), axis=0)
    low = tl.min(tl.load(LOW + part, mask=real, other=0xFFFFFFFF), axis=0)
    all_mass = tl.sum(tl.load(MASS + part, mask=real, other=0.0), axis=0) * UNIT
    gathered = tl.load(GATHERED + row)
    held = tl.arange(0, ROOM) < gathered
    key = tl.load(KEYS + row * ROOM + tl.arange(0, ROOM), mask=held, other=0)
    top_k = tl.load(TOP_K + row)
    top_p = tl.load(TOP_P + row)
    top = tl.load(TOP + row)
    rank = tl.where(top_k > 0, tl.minimum(top_k, left), left)
    border = low
    count = rank
    known = (rank == left) & (top_p >= 1)
    if (known == 0) & (gathered <= ROOM):
        one = held.to(tl.int64)
        if rank <= gathered:
            known = rank > 0
            border = _largest(key, one, rank, 32)
        if top_p < 1:
            mass = tl.where(held, _weight(key, top) * UNIT + 0.5, 0.0).to(tl.int64)
            here = tl.sum(mass, axis=0)
            total = all_mass
            if known:
                above = key > border
                equal = rank - tl.sum(above.to(tl.int64), axis=0)
                of_border = (_weight(border, top) * UNIT + 0.5).to(tl.int64)
                here = tl.sum(tl.where(above, mass, 0), axis=0) + equal * of_border
                total = here.to(tl.float64)
            goal = tl.maximum(tl.ceil(top_p * total).to(tl.int64), 1)
            goal = tl.where(known, tl.minimum(goal, here), goal)
            if (goal <= here) & (known | (rank == left)):
                known = goal > 0
                border = _largest(key, mass, goal, 32)
                above = key > border
                of_border = tl.maximum((_weight(border, top) * UNIT + 0.5).to(tl.int64), 1)
                missing = goal - tl.sum(tl.where(above, mass, 0), axis=0)
                enough = tl.sum(above.to(tl.int64), axis=0) + (missing + of_border - 1) // of_border
                count = tl.minimum(count, enough)
    last = tl.full((), vocab, tl.int64)
    if known & ((rank < left) | (top_p < 1)):
        equal = key == border
        wanted = count - tl.sum((key > border).to(tl.int64), axis=0)
        if wanted < tl.sum(equal.to(tl.int64), axis=0):
            token = tl.load(IDS + row * ROOM + tl.arange(0, ROOM), mask=held, other=0)
            turned = tl.where(equal, (1 << BITS) - 1 - token, 0).to(tl.uint32)
            last = (1 << BITS) - 1 - _largest(turned, equal.to(tl.int64), wanted, BITS).to(tl.int64)
    tl.store(BORDER + row, tl.where(left > 0, _value(border), float("-inf")).to(tl.float64))
    tl.store(LAST + row, last)
    tl.store(DONE + row, (known | (left == 0)).to(tl.int32))


@triton.jit
def _keys_at(logits, begin, vocab, temperature, TILE: tl.constexpr):
    """Return the keys of a tile of a row."""
    token = begin + tl.arange(0, TILE)
    raw = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    return _key(tl.div_rn(raw, tl.broadcast_to(temperature, (TILE,))))


@triton.jit
def _largest_of_row(logits, temperature, floor, top, goal, vocab, MASS: tl.constexpr, TILE: tl.constexpr):
    """Return the largest uint32 c for which ids of keys >= c and >= floor number, or weigh, `goal` float64 at least."""
    found = tl.full((), 0, tl.uint32)
    for step in range(16):
        unit = tl.full((), 1 << 30, tl.uint32) >> (2 * step)
        one = tl.zeros((TILE,), tl.float64)
        two = tl.zeros((TILE,), tl.float64)
        three = tl.zeros((TILE,), tl.float64)
        for begin in range(0, vocab, TILE):
            key = _keys_at(logits, begin, vocab, temperature, TILE)
            weight = tl.where(key >= floor, _weight(key, top) if MASS else 1.0, 0.0)
            one += tl.where(key >= found + unit, weight, 0.0)
            two += tl.where(key >= found + unit + unit, weight, 0.0)
            three += tl.where(key >= found + unit + unit + unit, weight, 0.0)
        up = (tl.sum(one, axis=0) >= goal).to(tl.uint32) + (tl.sum(two, axis=0) >= goal).to(tl.uint32)
        found += (up + (tl.sum(three, axis=0) >= goal).to(tl.uint32)) * unit
    return found


@triton.jit
def _beside(logits, temperature, top, border, vocab, TILE: tl.constexpr):
    """Return how many keys are above a border, their mass, and how many are equal to it."""
    above = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.float64)
    equal = tl.zeros((TILE,), tl.int32)
    for begin in range(0, vocab, TILE):
        key = _keys_at(logits, begin, vocab, temperature, TILE)
        above += (key > border).to(tl.int32)
        mass += tl.where(key > border, _weight(key, top), 0.0)
        equal += (key == border).to(tl.int32)
    return tl.sum(above, axis=0).to(tl.int64), tl.sum(mass, axis=0), tl.sum(equal, axis=0).to(tl.int64)


@triton.jit
def _search_whole(
    LOGITS, AT, TEMPERATURE, TOP_K, TOP_P, TOP, FLOOR, LEFT, LOW, BORDER, LAST, DONE, vocab, row_stride, parts,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(DONE + row) != 0:
        return
    logits = LOGITS + tl.load(AT + row) * row_stride
    temperature = tl.load(TEMPERATURE + row).to(tl.float32)
    floor, top = tl.load(FLOOR + row), tl.load(TOP + row)
    part = row * parts + tl.arange(0, PARTS)
    real = tl.arange(0, PARTS) < parts
    left = tl.sum(tl.load(LEFT + part, mask=real, other=0).to(tl.int64), axis=0)
    border = tl.min(tl.load(LOW + part, mask=real, other=0xFFFFFFFF), axis=0)
    top_k = tl.load(TOP_K + row)
    top_p = tl.load(TOP_P + row)
    count = tl.where(top_k > 0, tl.minimum(top_k, left), left)
    if count < left:
        border = _largest_of_row(logits, temperature, floor, top, count.to(tl.float64), vocab, False, TILE)
    above, mass, equal = _beside(logits, temperature, top, border, vocab, TILE)
    if top_p < 1:
        goal = top_p * (mass + (count - above).to(tl.float64) * _weight(border, top))
        # Sums in two orders may miss a goal that is all.
        border = tl.maximum(border, _largest_of_row(logits, temperature, floor, top, goal, vocab, True, TILE))
        above, mass, equal = _beside(logits, temperature, top, border, vocab, TILE)
        missing = tl.ceil((goal - mass) / tl.maximum(_weight(border, top), 1e-300))
        count = tl.minimum(count, above + tl.maximum(tl.minimum(missing, equal.to(tl.float64)), 1.0).to(tl.int64))
    last = tl.full((), vocab, tl.int64)
    wanted = count - above
    if wanted < equal:
        passed = tl.zeros((), tl.int64)
        for begin in range(0, vocab, TILE):
            key = _keys_at(logits, begin, vocab, temperature, TILE)
            token = begin + tl.arange(0, TILE)
            through = tl.cumsum((key == border).to(tl.int32), axis=0) + passed
            found = (key == border) & (through == wanted)
            last = tl.minimum(last, tl.min(tl.where(found, token, vocab), axis=0).to(tl.int64))
            passed = tl.max(through, axis=0)
    tl.store(BORDER + row, _value(border).to(tl.float64))
    tl.store(LAST + row, last)


def token_borders(
    logits: torch.Tensor,
    at: torch.Tensor,
    temperature: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (border float64 [r], last int64 [r]): of rows `at` of `logits` [m, vocab], divided by `temperature`, min-p,
    top-k and top-p leave what is above the border, and what equals it if its id is not above `last`.

    `logits` float32, rows dense; `at` int64 [r]; `temperature` float64 [r]; `log_min_p` float64 [r], -inf: off; `top_k`
    int64 [r], 0: off; `top_p` float64 [r], 1: off. `last` is vocab where all that equal the border are left. -inf is
    never left; without anything else the border is -inf. Masses are summed in another order than the reference's: where
    the mass of some ids is top-p's goal but for 1e-12 of it, one id more or less may be left.
    """
    rows, vocab = at.shape[0], logits.shape[1]
    assert logits.stride(1) == 1
    assert logits.dtype is torch.float32
    shape = shape_of(vocab)
    device = logits.device
    border = torch.empty(rows, dtype=torch.float64, device=device)
    last = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return border, last
    reaches, parts = triton.cdiv(vocab, shape.reach), triton.cdiv(vocab, shape.part)
    groups = reaches * (shape.width // shape.fold)
    best = torch.empty(rows, groups, dtype=torch.float32, device=device)
    top, mass = (torch.empty(n, dtype=torch.float64, device=device) for n in (rows, rows * parts))
    reached, floor, low, keys = (
        torch.empty(n, dtype=torch.uint32, device=device) for n in (rows, rows, rows * parts, rows * shape.room)
    )
    gathered, left, ids, done = (
        torch.empty(n, dtype=torch.int32, device=device) for n in (rows, rows * parts, rows * shape.room, rows)
    )
    stride = logits.stride(0)
    _best_of_groups[(rows, reaches)](
        logits, at, best, vocab, stride, REACH=shape.reach, WIDTH=shape.width, FOLD=shape.fold,
        num_warps=shape.first_warps,
    )  # fmt: skip
    _begin[(rows,)](
        best, temperature, log_min_p, top, reached, floor, gathered, groups,
        K=shape.best, GROUPS=triton.next_power_of_2(groups), num_warps=shape.search_warps,
    )  # fmt: skip
    _gather[(rows, parts)](
        logits, at, temperature, top_k, top_p, top, reached, floor, gathered, keys, ids, left, low, mass, vocab, stride,
        K=shape.best, ROOM=shape.room, PART=shape.part, num_warps=shape.gather_warps,
    )  # fmt: skip
    padded = triton.next_power_of_2(parts)
    _search[(rows,)](
        top_k, top_p, top, gathered, keys, ids, left, low, mass, border, last, done, vocab, parts,
        ROOM=shape.room, PARTS=padded, BITS=2 * -(-vocab.bit_length() // 2), num_warps=shape.search_warps,
    )  # fmt: skip
    _search_whole[(rows,)](
        logits, at, temperature, top_k, top_p, top, floor, left, low, border, last, done, vocab, stride, parts,
        PARTS=padded, TILE=2048, num_warps=shape.whole_warps,
    )  # fmt: skip
    return border, last
