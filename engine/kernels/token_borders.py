# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""What min-p, top-k and top-p leave of rows of logits, without sorting them and without waiting for anything.

A border is searched for by bits among the few ids that `best_ids` gathers. Flat rows have theirs elsewhere: two more
readings weigh, in float32, the ids beyond 16 values, which leaves it between two of them; a third gathers those and weighs
what is above. Rows that even that leaves open (thousands of equal logits, a large top-k with top-p behind it) are read
until it is found. Masses of gathered ids are integers, so that their order in memory, which is any, changes no bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import best_ids
from engine.kernels.best_ids import (
    append,
    gather_best,
    groups_of,
    key_of,
    largest_key,
    raw_of,
    scaled_keys,
    value_of,
    weight_of,
)
from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.token_borders_whole import search_whole

UNIT = tl.constexpr(2.0**49)
"""Of integer masses: sums of up to 8192 weights, each 1 at most, stay below 2^63."""
DONE = tl.constexpr(0)
BY_RANK = tl.constexpr(1)
"""The border is the largest key that `goal` ids reach."""
BY_MASS = tl.constexpr(2)
"""The largest whose ids weigh `goal`."""
WHOLE = tl.constexpr(3)
"""A rank first and a mass behind it, or a mass that was not summed."""


class Shape(NamedTuple):
    """What a launcher may choose; the first nine as in `best_ids`."""

    best: int
    room: int
    reach: int
    width: int
    fold: int
    part: int
    tile: int
    first_warps: int
    begin_warps: int
    gather_warps: int
    search_warps: int = 8
    pieces: int = 16
    """Values whose ids a reading of flat rows weighs."""
    cut_tile: int = 2048
    """Ids that it looks at in one go."""
    cut_warps: int = 4
    last_room: int = 8192
    """For how many ids of the last piece."""
    last_warps: int = 16


def shape_of(vocab: int) -> Shape:
    """Return the shape for rows of `vocab` ids: of any number of rows, because masses of parts are added in their order."""
    shape = best_ids.Shape(1, 1, part=4096)
    best = max(1, min(512, groups_of(vocab, shape) // 2))
    room = max(64, next_power_of_2(2 * best))
    return Shape(*shape._replace(best=best, room=room, tile=512), last_room=8 * room)


@triton.jit
def _among(key, weight, goal):
    """Return the largest key that int64 weights reach a goal with, and how many of its ids that takes."""
    border = largest_key(key, weight, goal, 32, 16)
    missing = goal - tl.sum(tl.where(key > border, weight, 0), axis=0)
    each = tl.maximum(tl.max(tl.where(key == border, weight, 0), axis=0), 1)
    return border, (missing + each - 1) // each


@triton.jit
def _last_of(IDS, place, equal, wanted, vocab, BITS: tl.constexpr):
    """Return the id of number `wanted` among those equal to the border, ascending; vocab: all of them are left."""
    last = tl.full((), vocab, tl.int64)
    if wanted < tl.sum(equal.to(tl.int64), axis=0):
        turned = tl.where(equal, (1 << BITS) - 1 - tl.load(IDS + place, mask=equal, other=0), 0).to(tl.uint32)
        last = (1 << BITS) - 1 - largest_key(turned, equal.to(tl.int64), wanted, BITS, BITS // 2).to(tl.int64)
    return last


@triton.jit
def _integer(weight):
    return (weight * UNIT + 0.5).to(tl.int64)


@triton.jit
def _integer_goal(goal):
    """Return int64; what no sum reaches becomes 16384 units."""
    return tl.ceil(tl.minimum(goal, 16384.0) * UNIT).to(tl.int64)


@kernel
def _search(
    TEMPERATURE, TOP_K, TOP_P, TOP, REACHED, FLOOR, COUNT, VALUES, IDS, LEFT, LOW, MASS, BORDER, LAST,
    MODE, GOAL, FROM, TO, LAST_COUNT, vocab, parts,
    K: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Find a row's border among the ids gathered, or say how and between which keys it is to be found."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    left = tl.sum(tl.load(LEFT + row * parts + part, mask=part < parts, other=0).to(tl.int64), axis=0)
    lows = tl.load(LOW + row * parts + part, mask=part < parts, other=float("inf"))
    all_mass = tl.sum(tl.load(MASS + row * parts + part, mask=part < parts, other=0.0), axis=0)
    gathered = tl.load(COUNT + row)
    place = tl.arange(0, ROOM)
    temperature = tl.load(TEMPERATURE + row).to(tl.float32)
    low = tl.min(scaled_keys(lows, temperature), axis=0)
    raw = tl.load(VALUES + row * ROOM + place, mask=place < gathered, other=float("-inf"))
    key = scaled_keys(raw, temperature)
    top_k, top_p, top = tl.load(TOP_K + row), tl.load(TOP_P + row), tl.load(TOP + row)
    rank = tl.where(top_k > 0, tl.minimum(top_k, left), left)
    complete = gathered <= ROOM
    border = low
    wanted = left
    known = (rank == left) & (top_p >= 1)
    goal = rank.to(tl.float64)
    if complete & (known == 0):
        ranked = (rank < left) & (rank <= gathered)
        if ranked:
            border, wanted = _among(key, (place < gathered).to(tl.int64), rank)
            known = top_p >= 1
        if top_p < 1:
            mass = tl.where(place < gathered, _integer(weight_of(key, top)), 0)
            here = tl.sum(mass, axis=0)
            total = tl.where(left == gathered, here.to(tl.float64) / UNIT, all_mass)
            if ranked:
                here = tl.sum(tl.where(key > border, mass, 0), axis=0) + wanted * _integer(weight_of(border, top))
                total = here.to(tl.float64) / UNIT
            goal = tl.where(ranked | (rank == left), top_p * total, goal)
            needed = _integer_goal(goal)
            if ranked | ((rank == left) & ((needed <= here) | (left == gathered))):
                border, wanted = _among(key, mass, tl.maximum(tl.minimum(needed, here), 1))
                known = rank > 0
    elif top_p < 1:
        goal = top_p * all_mass
    tl.store(BORDER + row, tl.where(left > 0, value_of(border), float("-inf")).to(tl.float64))
    if known:
        tl.store(LAST + row, _last_of(IDS + row * ROOM, place, key == border, wanted, vocab, BITS))
    else:
        tl.store(LAST + row, tl.full((), vocab, tl.int64))
    summed = (tl.load(REACHED + row) > tl.load(FLOOR + row)) & ((top_k <= 0) | (top_k > K))
    by_mass = tl.where(summed & (rank == left), BY_MASS, WHOLE)
    tl.store(MODE + row, tl.where(known | (left == 0), DONE, tl.where(top_p < 1, by_mass, BY_RANK)))
    tl.store(GOAL + row, goal)
    # What is so far below the top weighs nothing, unless all of it is wanted.
    light = tl.where((top_p < 1) & (top_p < 1 - 1e-9), top - 45.0, float("-inf")).to(tl.float32)
    tl.store(FROM + row, tl.maximum(low, key_of(light)))
    above = key_of(top.to(tl.float32)).to(tl.int64) + 1
    tl.store(TO + row, tl.where(complete, tl.load(REACHED + row).to(tl.int64), above).to(tl.uint32))
    tl.store(LAST_COUNT + row, 0)


@kernel
def _weigh_cuts(
    LOGITS, AT, TEMPERATURE, TOP, MODE, FROM, TO, CUTS, SUMS, vocab, row_stride,
    PIECES: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Number or weigh, nearly, the ids of every tile that reach each of some keys between two."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    mode = tl.load(MODE + row)
    if (mode != BY_RANK) & (mode != BY_MASS):
        return
    logits = LOGITS + tl.load(AT + row) * row_stride
    begin, end = tl.load(FROM + row), tl.load(TO + row)
    top = tl.load(TOP + row).to(tl.float32)
    low = value_of(begin)
    step = (value_of(end) - low) / (PIECES + 1)
    temperature = tl.load(TEMPERATURE + row).to(tl.float32)
    for i in range(PART // TILE):
        token = part * PART + i * TILE + tl.arange(0, TILE)
        raw = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        key = scaled_keys(raw, temperature)
        weight = tl.where(mode == BY_MASS, tl.exp(value_of(key) - top), 1.0)
        at = ((row * tl.num_programs(1) + part) * (PART // TILE) + i) * PIECES
        for j in tl.static_range(PIECES):
            # Not the lower end, which is reached, and not the upper one, which is not.
            cut = tl.minimum(tl.maximum(key_of(low + step * (j + 1)), begin), end - 1)
            tl.store(SUMS + at + j, tl.sum(tl.where(key >= cut, weight, 0.0), axis=0))
            if (part == 0) & (i == 0):
                tl.store(CUTS + row * PIECES + j, cut)


@kernel
def _choose_piece(TEMPERATURE, MODE, GOAL, FROM, TO, CUTS, SUMS, RAW, tiles, PIECES: tl.constexpr, TILES: tl.constexpr):
    """Narrow the keys between which a row's border is, by sums that are right to 1e-4; write the logits for both."""
    row = tl.program_id(0)
    mode = tl.load(MODE + row)
    if (mode != BY_RANK) & (mode != BY_MASS):
        return
    cut, tile = tl.arange(0, PIECES), tl.arange(0, TILES)
    place = (row * tiles + tile)[:, None] * PIECES + cut[None, :]
    sums = tl.sum(tl.load(SUMS + place, mask=(tile < tiles)[:, None], other=0.0).to(tl.float64), axis=0)
    cuts = tl.load(CUTS + row * PIECES + cut)
    goal = tl.load(GOAL + row)
    reached = tl.where(sums >= goal * (1 + 1e-4), cuts, 0).to(tl.uint32)
    missed = tl.where(sums <= goal * (1 - 1e-4), cuts, 0xFFFFFFFF).to(tl.uint32)
    begin = tl.maximum(tl.load(FROM + row), tl.max(reached, axis=0))
    end = tl.minimum(tl.load(TO + row), tl.min(missed, axis=0))
    tl.store(FROM + row, begin)
    tl.store(TO + row, end)
    both = tl.arange(0, 2)
    bounds = tl.where(both == 0, begin, end).to(tl.uint32)
    tl.store(RAW + 2 * row + both, raw_of(bounds, tl.load(TEMPERATURE + row).to(tl.float32)))


@kernel
def _gather_piece(
    LOGITS, AT, TEMPERATURE, TOP, MODE, RAW, COUNT, VALUES, IDS, MASS, vocab, row_stride,
    ROOM: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gather what is between two keys; number or weigh what is above."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    mode = tl.load(MODE + row)
    if (mode != BY_RANK) & (mode != BY_MASS):
        return
    logits = LOGITS + tl.load(AT + row) * row_stride
    token = part * PART + tl.arange(0, TILE)
    raw = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    begin, end, top = tl.load(RAW + 2 * row), tl.load(RAW + 2 * row + 1), tl.load(TOP + row)
    temperature = tl.load(TEMPERATURE + row).to(tl.float32)
    mass = tl.zeros((TILE,), tl.float64)
    for i in range(PART // TILE):
        ahead = token + TILE
        following = tl.load(logits + ahead, mask=(ahead < vocab) & (i + 1 < PART // TILE), other=float("-inf"))
        append(COUNT, VALUES, IDS, row, raw, token, (raw >= begin) & (raw < end), ROOM)
        weight = tl.full((TILE,), 1.0, tl.float64)
        if mode == BY_MASS:
            scaled = tl.div_rn(raw, tl.broadcast_to(temperature, raw.shape))
            weight = tl.exp(scaled.to(tl.float64) - top)
        mass += tl.where(raw >= end, weight, 0.0)
        token = ahead
        raw = following
    tl.store(MASS + row * tl.num_programs(1) + part, tl.sum(mass, axis=0))


@kernel
def _search_piece(
    TEMPERATURE, TOP, MODE, GOAL, COUNT, VALUES, IDS, MASS, BORDER, LAST, vocab, parts,
    ROOM: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Find a row's border among the ids of its last piece, unless they are too many or it is not there."""
    row = tl.program_id(0)
    mode = tl.load(MODE + row)
    gathered = tl.load(COUNT + row)
    if ((mode != BY_RANK) & (mode != BY_MASS)) | (gathered > ROOM):
        return
    part, place = tl.arange(0, PARTS), tl.arange(0, ROOM)
    base = tl.sum(tl.load(MASS + row * parts + part, mask=part < parts, other=0.0), axis=0)
    raw = tl.load(VALUES + row * ROOM + place, mask=place < gathered, other=float("-inf"))
    key = scaled_keys(raw, tl.load(TEMPERATURE + row).to(tl.float32))
    weight = (place < gathered).to(tl.int64)
    missing = tl.load(GOAL + row) - base
    goal = missing.to(tl.int64)
    if mode == BY_MASS:
        weight = tl.where(place < gathered, _integer(weight_of(key, tl.load(TOP + row))), 0)
        goal = _integer_goal(missing)
    here = tl.sum(weight, axis=0)
    # Sums in two orders may miss a goal that is all of a row.
    if (missing > 0) & ((goal <= here) | (missing - here.to(tl.float64) / UNIT <= 1e-11 * base)):
        border, wanted = _among(key, weight, tl.minimum(goal, here))
        tl.store(BORDER + row, value_of(border).to(tl.float64))
        tl.store(LAST + row, _last_of(IDS + row * ROOM, place, key == border, wanted, vocab, BITS))
        tl.store(MODE + row, DONE)


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
    the mass of some ids is top-p's goal but for 1e-11 of it, one id more or less may be left.
    """
    rows, vocab, device = at.shape[0], logits.shape[1], logits.device
    shape = shape_of(vocab)
    border = torch.empty(rows, dtype=torch.float64, device=device)
    last = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return border, last
    found = gather_best(logits, at, (temperature, log_min_p, top_k, top_p), best_ids.Shape(*shape[:10]))
    parts, stride = cdiv(vocab, shape.part), logits.stride(0)
    padded, bits = next_power_of_2(parts), 2 * -(-vocab.bit_length() // 2)
    tiles = parts * (shape.part // shape.cut_tile)
    goal, mass = (torch.empty(n, dtype=torch.float64, device=device) for n in (rows, rows * parts))
    sums, raw, values = (
        torch.empty(rows * n, dtype=torch.float32, device=device) for n in (tiles * shape.pieces, 2, shape.last_room)
    )
    begin, end, cuts = (torch.empty(rows * n, dtype=torch.uint32, device=device) for n in (1, 1, shape.pieces))
    mode, count, ids = (torch.empty(rows * n, dtype=torch.int32, device=device) for n in (1, 1, shape.last_room))
    _search[(rows,)](
        temperature, top_k, top_p, found.top, found.reached, found.floor, found.count, found.values, found.ids,
        found.left, found.low, found.mass, border, last, mode, goal, begin, end, count, vocab, parts,
        K=shape.best, ROOM=shape.room, PARTS=padded, BITS=bits, num_warps=shape.search_warps,
    )  # fmt: skip
    for _ in range(2):
        _weigh_cuts[(rows, parts)](
            logits, at, temperature, found.top, mode, begin, end, cuts, sums, vocab, stride,
            PIECES=shape.pieces, PART=shape.part, TILE=shape.cut_tile, num_warps=shape.cut_warps,
        )  # fmt: skip
        _choose_piece[(rows,)](
            temperature, mode, goal, begin, end, cuts, sums, raw, tiles,
            PIECES=shape.pieces, TILES=next_power_of_2(tiles), num_warps=4,
        )  # fmt: skip
    _gather_piece[(rows, parts)](
        logits, at, temperature, found.top, mode, raw, count, values, ids, mass, vocab, stride,
        ROOM=shape.last_room, PART=shape.part, TILE=shape.tile, num_warps=shape.gather_warps,
    )  # fmt: skip
    _search_piece[(rows,)](
        temperature, found.top, mode, goal, count, values, ids, mass, border, last, vocab, parts,
        ROOM=shape.last_room, PARTS=padded, BITS=bits, num_warps=shape.last_warps,
    )  # fmt: skip
    search_whole[(rows,)](
        logits, at, temperature, top_k, top_p, found.top, found.floor, found.left, found.low, border, last, mode,
        vocab, stride, parts, PARTS=padded, TILE=2048, num_warps=8,
    )  # fmt: skip
    return border, last
