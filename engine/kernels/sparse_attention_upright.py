# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The body of sparse attention where products are summed in tensor memory (128 lanes of 512 columns).

There eight outputs [heads, words] and the scores would need 576 columns: so keys and words are the lanes and heads the
columns. A key is unpacked into eight planes (elements n, n + 8, ..), and outputs are of two planes each.
"""

import triton
import triton.language as tl

from engine.kernels.device import UNPLANED, e4m3_value, eight, fp4_planes, power


@triton.jit
def _whole(p, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return [ROWS, WIDTH] of eight planes."""
    low = tl.join(tl.join(p[0], p[4]), tl.join(p[2], p[6]))
    high = tl.join(tl.join(p[1], p[5]), tl.join(p[3], p[7]))
    return tl.reshape(tl.join(low, high), (ROWS, WIDTH))


@triton.jit
def _byte(words, n: tl.constexpr, scales):
    """Return bfloat16 2^-60 * scale * byte n of int64 words as e4m3."""
    code = ((words >> (8 * n)) & 0xFF).to(tl.uint8)
    return (e4m3_value(code) * scales).to(tl.bfloat16)


@triton.jit
def _attend(queries, keys, valid, most, total, o, SCALE: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr):
    """Take one tile of keys, eight planes [TILE, WORDS], into the running softmax; returns most, total, outputs.

    Outputs are four [2 WORDS, H] whose rows are those of two planes in turns.
    """
    scores = tl.zeros((H, TILE), tl.float32)
    for n in tl.static_range(8):
        scores = tl.dot(queries[n], tl.trans(keys[n]), scores)
    scores = tl.where(valid[None, :], scores * (SCALE * UNPLANED), float("-inf"))
    new = tl.maximum(most, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new[:, None])
    old = tl.exp2(most - new)
    total = total * old + tl.sum(weights, axis=1)
    weights = tl.trans(weights.to(tl.bfloat16))
    old = old[None, :]
    return new, total, (
        tl.dot(_pair(keys[0], keys[1]), weights, o[0] * old), tl.dot(_pair(keys[2], keys[3]), weights, o[1] * old),
        tl.dot(_pair(keys[4], keys[5]), weights, o[2] * old), tl.dot(_pair(keys[6], keys[7]), weights, o[3] * old),
    )  # fmt: skip


@triton.jit
def _pair(a, b):
    """Return [2 WORDS, TILE] of two planes [TILE, WORDS]."""
    return tl.trans(tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1])))


@triton.jit
def _lying(o, H: tl.constexpr, WORDS: tl.constexpr):
    """Return the eight planes [H, WORDS] of four outputs of `_attend`."""
    p0, p1 = tl.split(tl.reshape(tl.trans(o[0]), (H, WORDS, 2)))
    p2, p3 = tl.split(tl.reshape(tl.trans(o[1]), (H, WORDS, 2)))
    p4, p5 = tl.split(tl.reshape(tl.trans(o[2]), (H, WORDS, 2)))
    p6, p7 = tl.split(tl.reshape(tl.trans(o[3]), (H, WORDS, 2)))
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def _window_keys(slot, valid, D: tl.constexpr, TILE: tl.constexpr):
    """Return eight planes [TILE, D / 8] of window rows at int64 pointers [TILE]."""
    codes = tl.load(slot[:, None] + tl.arange(0, D // 8)[None, :], mask=valid[:, None], other=0)
    at = slot.to(tl.pointer_type(tl.uint8))[:, None] + D + tl.arange(0, D // 32)[None, :]
    wide = power(tl.load(at, mask=valid[:, None], other=127).to(tl.int32) - 60)
    wide = tl.reshape(tl.broadcast_to(tl.expand_dims(wide, 2), (TILE, D // 32, 4)), (TILE, D // 8))
    return (
        _byte(codes, 0, wide), _byte(codes, 1, wide), _byte(codes, 2, wide), _byte(codes, 3, wide),
        _byte(codes, 4, wide), _byte(codes, 5, wide), _byte(codes, 6, wide), _byte(codes, 7, wide),
    )  # fmt: skip


@triton.jit
def _entry_keys(entry, valid, D: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr):
    """Return eight planes [TILE, D / 8] of entries at int32 pointers [TILE]."""
    words = tl.load(entry[:, None] + tl.arange(0, D // 8)[None, :], mask=valid[:, None], other=0)
    at = entry.to(tl.pointer_type(tl.uint8))[:, None] + D // 2 + tl.arange(0, D // 16)[None, :]
    scales = tl.load(at, mask=valid[:, None], other=0)
    lifted = (e4m3_value(scales) * 7.378697629483821e19).to(tl.bfloat16)  # 2^66, as `plane_scale` has it
    lifted = tl.reshape(tl.broadcast_to(tl.expand_dims(lifted, 2), (TILE, D // 16, 2)), (TILE, D // 8))
    return fp4_planes(words, lifted, PTX)


@triton.jit
def upright(
    Q, RING, RECORD, POSITIONS, FLOORS, ENTRIES, PAGES, OWNER, SELECTION,
    capacity, record_stride, entry_stride, page_stride, per_page, row, begin, end,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, TOP: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return most [H], total [H] and outputs float32 [H, D] times 2^-60 of a row over tiles `begin` .. `end` - 1."""
    WORDS: tl.constexpr = D // 8
    inside = tl.arange(0, TILE)
    whole = tl.arange(0, H)[:, None, None] * D + tl.arange(0, WORDS)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    queries = eight(tl.load(Q + row * (H * D) + whole), H, WORDS)
    zero = tl.zeros((2 * WORDS, H), tl.float32)
    o = (zero, zero, zero, zero)
    most = tl.full((H,), -1e30, tl.float32)
    total = tl.zeros((H,), tl.float32)
    position = tl.load(POSITIONS + row)
    floor = tl.maximum(tl.load(FLOORS + row), 0)
    ring = RING + tl.load(RECORD + row) * record_stride
    for tile in tl.range(begin, tl.minimum(end, WINDOW // TILE)):
        seen = position - (WINDOW - 1) + tile * TILE + inside
        valid = seen >= floor
        slot = ring + tl.where(valid, seen % capacity, 0) * (D // 8 + D // 256)
        keys = _window_keys(slot, valid, D, TILE)
        most, total, o = _attend(queries, keys, valid, most, total, o, SCALE, H, TILE)
    pages = PAGES + tl.load(OWNER + row) * page_stride
    for tile in tl.range(tl.maximum(begin - WINDOW // TILE, 0), end - WINDOW // TILE):
        chosen = tl.load(SELECTION + row * TOP + tile * TILE + inside)
        valid = chosen >= 0
        chosen = tl.maximum(chosen, 0)
        page = tl.load(pages + chosen // per_page).to(tl.int64)
        entry = ENTRIES + page * entry_stride + (chosen % per_page) * (D // 8 + D // 64)
        keys = _entry_keys(entry, valid, D, TILE, PTX)
        most, total, o = _attend(queries, keys, valid, most, total, o, SCALE, H, TILE)
    return most, total, _whole(_lying(o, H, WORDS), H, D)
