# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Linears of e4m3 weights with a power of two per block of 32 x 32, over rows quantized in groups of 32.

A pass unpacks 128 bytes of weights into the registers that are a factor of the matrix unit: bfloat16 with the power of two
multiplied in, exactly, so that one float32 sum in the unit takes it all. Rows become such factors too: in the pass if they
are few, else by a kernel ahead, which lays them as a pass unpacks weights, the even columns and then the odd. Weights are
the rows of the product: they are what decoding reads. Groups of rows and weights that belong together (a block-diagonal
weight) are one launch. Where few programs would read, K is cut in parts, whose sums a second kernel adds in their order.
Many rows are widened to bfloat16, which is exact, for the vendor's product; where the order of sums is fixed, for one that
adds the parts of K in its registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, e4m3_value, settled
from engine.kernels.launch import cdiv, kernel, next_power_of_2
from engine.kernels.overlap import after_kernels_before, options, overlaps

_MULTIPROCESSORS = 132
_CUTS = {16: (2, 4), 32: (2, 4), 64: (3, 3), 128: (1, 4), 256: (1, 3)}
"""By rows of a tile: programs that a multiprocessor holds, into so many of which K is cut, and stages of copies."""
_MOST_SPLITS = 16
_FEW_TILES = 16
"""Of 128 rows of weights each."""
_PIECES = 32
"""Of a pass of columns each, that a program widens if they are many."""
_FIXED_TILE = 32
_FIXED_ROWS = 1024
"""Rows of a launch where parts are fixed, which bounds their memory."""
_LAID_FROM = 512
"""Rows above which, where parts are fixed, weights are widened once and not by every tile of rows."""
_MOST_ROWS = 256
"""Above, widening the weights costs less than the vendor's product wins."""


class Shape(NamedTuple):
    """What the launcher chooses."""

    height: int
    """Rows of weights a program has, 64 or 128."""
    tile: int
    """Rows of activations a program has."""
    splits: int
    """Parts of K, not all of one length."""
    ahead: bool
    """Rows are widened by a kernel of their own; a pass is a product of even columns and one of odd ones."""
    widened: bool
    """Through bfloat16 and the vendor's product, or, where parts are fixed, a product that adds them in its registers."""
    num_warps: int
    num_stages: int
    pdl: bool


def shape_of(rows: int, out: int, inner: int, groups: int, *, fixed: bool) -> Shape:
    """Return the shape for sizes, as an H200 timed best; `fixed`: the order of no sum depends on `rows`."""
    few = groups * cdiv(out, 128) <= _FEW_TILES
    # A tile of 256 rows needs more shared memory than AMD's chips have.
    if rows > (_MOST_ROWS if chip.speaks_ptx() and not few else 128) and not fixed:
        return Shape(128, 128, 1, ahead=False, widened=True, num_warps=8, num_stages=3, pdl=overlaps())
    if fixed and rows > _LAID_FROM and chip.sums_alike():
        splits = _splits(_FIXED_TILE, out, inner, groups)
        return Shape(128, 128, splits, ahead=True, widened=True, num_warps=8, num_stages=5, pdl=overlaps())
    free = max(16, min(_MOST_ROWS, next_power_of_2(rows)))
    tile = _FIXED_TILE if fixed and not chip.sums_alike() else free
    height, stages = _height(tile, out, groups), _CUTS[tile][1]
    splits = _splits(_FIXED_TILE if fixed else tile, out, inner, groups)
    # One product of even and odd columns adds in the order of two: so it is on Hopper.
    ahead = tile > 16 or splits == 1 or (fixed and not chip.sums_alike())
    if tile == 128 and height == 64:
        stages -= 1
    warps = 4 if height == 64 or tile <= 32 else 8
    return Shape(height, tile, splits, ahead, widened=False, num_warps=warps, num_stages=stages, pdl=overlaps())


def _height(tile: int, out: int, groups: int) -> int:
    tiles = groups * cdiv(out, 128)
    few, many = tiles <= _FEW_TILES, tiles > _MULTIPROCESSORS
    return 64 if {16: few or many, 32: few, 64: not many, 128: many}.get(tile, False) else 128


def _splits(tile: int, out: int, inner: int, groups: int) -> int:
    most = _CUTS[tile][0] * _MULTIPROCESSORS // (groups * cdiv(out, _height(tile, out, groups)))
    return max(1, min(most, inner // _step(inner), _MOST_SPLITS))


def _step(inner: int) -> int:
    """Return the columns of a pass: a power of two from 32 to 128 that divides `inner`."""
    return min(128, inner & -inner)


@triton.jit
def _factor(codes, powers, ODD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PTX: tl.constexpr):
    """Return bfloat16 [ROWS, STEP / 2], exactly 2^-30 times what int16 `codes`, two of e4m3 each, mean: the even or the odd.

    `powers`: e8m0, uint8 [ROWS, STEP / 32], or, of 128 columns, int32 [ROWS, 1], four each; codes 1 .. 164.
    """
    if STEP == 128:
        even = tl.join(powers & 255, (powers >> 16) & 255)
        powers = tl.reshape(tl.join(even, tl.join((powers >> 8) & 255, (powers >> 24) & 255)), (ROWS, 4))
    # Sign, exponent and mantissa where bfloat16 has them are the value's 2^-120.
    wide = ((powers.to(tl.int16) + 90) << 7).to(tl.bfloat16, bitcast=True)
    wide = tl.broadcast_to(tl.expand_dims(wide, 2), (ROWS, STEP // 32, 16))
    pairs = tl.reshape(codes, (ROWS, STEP // 32, 16))
    if PTX:
        # Two pairs at a time: no value leaves its thread.
        made = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            and.b32 a, $1, 0x80008000;  shr.b32 b, $1, 4;  and.b32 b, b, 0x07F007F0;
            or.b32 a, a, b;  mul.rn.bf16x2 $0, a, $2;
            }"""
            if ODD
            else """{
            .reg .b32 a, b;
            shl.b32 a, $1, 8;  and.b32 a, a, 0x80008000;  shl.b32 b, $1, 4;  and.b32 b, b, 0x07F007F0;
            or.b32 a, a, b;  mul.rn.bf16x2 $0, a, $2;
            }""",
            "=r,r,r",
            [pairs, wide],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        code = ((pairs.to(tl.int32) >> (8 if ODD else 0)) & 255).to(tl.uint8)
        made = (e4m3_value(code) * (wide.to(tl.float32) * 7.52316384526264e-37)).to(tl.bfloat16)
    return tl.reshape(made, (ROWS, STEP // 2))


@triton.jit
def _both(codes, powers, ROWS: tl.constexpr, STEP: tl.constexpr, PTX: tl.constexpr):
    """Return [ROWS, STEP]: the even of `_factor`, then the odd."""
    both = tl.join(_factor(codes, powers, False, ROWS, STEP, PTX), _factor(codes, powers, True, ROWS, STEP, PTX))
    return tl.reshape(tl.permute(both, (0, 2, 1)), (ROWS, STEP))


@kernel
def _dense_linear(
    X, S, W, WS, OUT, count, K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    STEP: tl.constexpr, PACK: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    STEPS: tl.constexpr = K // STEP
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    group, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    here, exists = n < N, row < count
    # Weights that do not exist are others, which saves predicates.
    held = n if N % ROWS == 0 else tl.minimum(n, N - 1)
    # Where four powers are one load, it is wide enough to be made ahead of its pass.
    word = tl.int32 if PACK == 4 else tl.uint8
    pairs, scales = tl.arange(0, STEP // 2)[None, :], tl.arange(0, STEP // 32 // PACK)[None, :]
    weight = W.to(tl.pointer_type(tl.int16)) + (group * N + held).to(tl.int64)[:, None] * (K // 2) + pairs
    weight_scale = (group * tl.cdiv(N, 32) + held // 32)[:, None] * (K // 32 // PACK) + scales
    weight_scale = WS.to(tl.pointer_type(word)) + weight_scale
    # Of rows, too, bfloat16 in the order of `_factor` or two codes.
    x = row.to(tl.int64)[:, None] * (GROUPS * K) + group * K
    rows = (X + x if AHEAD else X.to(tl.pointer_type(tl.int16)) + x // 2) + pairs
    row_scale = S.to(tl.pointer_type(word)) + x // (32 * PACK) + scales
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(split * STEPS // SPLITS * STEP, (split + 1) * STEPS // SPLITS * STEP, STEP):
        codes = tl.load(weight + start // 2)
        powers = tl.load(weight_scale + start // (32 * PACK))
        if AHEAD:
            # The odd are unpacked while the even are multiplied.
            right = tl.load(rows + start, mask=exists[:, None], other=0.0)
            total = tl.dot(_factor(codes, powers, False, ROWS, STEP, PTX), tl.trans(right), total)
            right = tl.load(rows + start + STEP // 2, mask=exists[:, None], other=0.0)
            total = tl.dot(_factor(codes, powers, True, ROWS, STEP, PTX), tl.trans(right), total)
        else:
            left = _both(codes, powers, ROWS, STEP, PTX)
            codes = tl.load(rows + start // 2, mask=exists[:, None], other=0)
            powers = tl.load(row_scale + start // (32 * PACK), mask=exists[:, None], other=0)
            total = tl.dot(left, tl.trans(_both(codes, powers, TILE, STEP, PTX)), total)
        total = settled(total, PTX)
    total *= UNPLANED
    place = (row.to(tl.int64) * (GROUPS * N) + group * N)[:, None] + n[None, :]
    inside = exists[:, None] & here[None, :]
    if SPLITS == 1:
        tl.store(OUT + place, tl.trans(total).to(tl.bfloat16), mask=inside)
    else:
        tl.store(OUT + split.to(tl.int64) * count * (GROUPS * N) + place, tl.trans(total), mask=inside)


@kernel
def _dense_laid(
    X, W, OUT, count, K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Parts of K as `_dense_linear` adds them, bit by bit, of factors that are widened and laid already."""
    after_kernels_before(PDL)
    STEPS: tl.constexpr = K // STEP
    HALF: tl.constexpr = STEP // 2
    # Programs that run together share rows of both sides.
    tile, block = tl.swizzle2d(tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), 8)
    group = tl.program_id(2)
    row, n = tile * TILE + tl.arange(0, TILE), block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, HALF)[None, :]
    x = X + tl.minimum(row, count - 1).to(tl.int64)[:, None] * (GROUPS * K) + group * K + columns
    weight = W + (group * N + tl.minimum(n, N - 1)).to(tl.int64)[:, None] * K + columns
    total = tl.zeros((TILE, ROWS), tl.float32)
    part = tl.zeros((TILE, ROWS), tl.float32)
    split, end = 0, STEPS // SPLITS * 2
    for half in tl.range(0, 2 * STEPS):
        part = tl.dot(tl.load(x + half * HALF), tl.trans(tl.load(weight + half * HALF)), part)
        if half + 1 == end:
            total += part
            part = tl.zeros((TILE, ROWS), tl.float32)
            split += 1
            end = (split + 1) * STEPS // SPLITS * 2
    place = OUT + row.to(tl.int64)[:, None] * (GROUPS * N) + group * N + n[None, :]
    tl.store(place, (total * UNPLANED).to(tl.bfloat16), mask=(row < count)[:, None] & (n < N)[None, :])


@kernel
def _sum_parts(PARTS, OUT, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(PARTS + split * count + at, mask=at < count, other=0.0)
    tl.store(OUT + at, total.to(tl.bfloat16), mask=at < count)


@kernel
def _widen(
    CODES, SCALES, OUT, count, K: tl.constexpr, N: tl.constexpr, HEIGHT: tl.constexpr, STEP: tl.constexpr,
    PACK: tl.constexpr, LAID: tl.constexpr, PIECES: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    EACH: tl.constexpr = K // STEP
    # Pieces of STEP columns, row after row.
    piece = tl.program_id(0).to(tl.int64) * PIECES + tl.arange(0, PIECES)
    inside = (piece < count)[:, None]
    row = piece // EACH
    scale = ((row // N * tl.cdiv(N, HEIGHT) + row % N // HEIGHT) * EACH + piece % EACH) * (STEP // 32 // PACK)
    scale = scale[:, None] + tl.arange(0, STEP // 32 // PACK)[None, :]
    word = tl.int32 if PACK == 4 else tl.uint8
    pairs = tl.arange(0, STEP // 2)[None, :]
    codes = tl.load(CODES.to(tl.pointer_type(tl.int16)) + piece[:, None] * (STEP // 2) + pairs, mask=inside, other=0)
    powers = tl.load(SCALES.to(tl.pointer_type(word)) + scale, mask=inside, other=0)
    even = _factor(codes, powers, False, PIECES, STEP, PTX)
    odd = _factor(codes, powers, True, PIECES, STEP, PTX)
    out = OUT + piece[:, None] * STEP
    if LAID:
        tl.store(out + pairs, even, mask=inside)
        tl.store(out + STEP // 2 + pairs, odd, mask=inside)
    else:
        both = tl.reshape(tl.join(even, odd), (PIECES, STEP))
        # The interpreter multiplies bit patterns of bfloat16.
        both = (both if PTX else both.to(tl.float32)) * 1073741824.0
        tl.store(out + tl.arange(0, STEP)[None, :], both.to(tl.bfloat16), mask=inside)


def _widened(
    codes: torch.Tensor, scales: torch.Tensor, height: int, step: int, pdl: bool, *, laid: bool
) -> torch.Tensor:
    """Return bfloat16 [.., n, k] of e4m3 codes [.., n, k] whose scales [.., ceil(n / height), k / 32] serve `height` rows.

    `laid`: as `_factor` makes them of a pass of `step` columns, the even of them and then the odd, 2^-30 times.
    """
    rows, inner = codes.shape[-2:]
    made = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    count = codes.numel() // step
    pieces = _PIECES if count >= _PIECES << 10 else 8
    # Of rows that have their own scales any number is one: no kernel for each.
    _widen[(cdiv(count, pieces),)](
        codes, scales, made, count, K=inner, N=rows if height > 1 else 1, HEIGHT=height, STEP=step,
        PACK=4 if step == 128 else 1, LAID=laid, PIECES=pieces, PTX=chip.speaks_ptx(), PDL=pdl, num_warps=4,
        **options(pdl),
    )  # fmt: skip
    return made


def _launch(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, made: torch.Tensor,
    shape: Shape,
) -> None:  # fmt: skip
    rows = len(codes)
    groups, out, inner = weight.shape
    step, splits, pdl = _step(inner), shape.splits, shape.pdl
    if shape.ahead:
        codes = _widened(codes, scales, 1, step, pdl, laid=True)
    sums = made if splits == 1 else torch.empty(splits, *made.shape, dtype=torch.float32, device=made.device)
    _dense_linear[(cdiv(rows, shape.tile), cdiv(out, shape.height), groups * splits)](
        codes, scales, weight, weight_scales, sums, rows, K=inner, N=out, GROUPS=groups, SPLITS=splits, STEP=step,
        PACK=4 if step == 128 else 1, AHEAD=shape.ahead, ROWS=shape.height, TILE=shape.tile, PTX=chip.speaks_ptx(),
        PDL=pdl, num_warps=shape.num_warps, num_stages=shape.num_stages, **options(pdl),
    )  # fmt: skip
    if splits > 1:
        block, count = 1024, made.numel()
        _sum_parts[(cdiv(count, block),)](
            sums, made, count, SPLITS=splits, BLOCK=block, PDL=pdl, num_warps=4, **options(pdl)
        )


def dense_linear(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, *, fixed: bool = False
) -> torch.Tensor:
    """Return bfloat16 [t, G n]: group g of every row times weight g.

    `codes` uint8 [t, G k] (e4m3), `scales` uint8 [t, G k / 32] (e8m0) of rows; `weight` uint8 [G, n, k], `weight_scales`
    uint8 [G, ceil(n / 32), k / 32]; all contiguous, k a multiple of 32, scales at addresses that are multiples of 4.
    Products are exact, their sums float32 along k as the matrix unit makes them (on Hopper with 13 bits below the largest of
    16), one rounding. Scale codes are at most 164; products below 2^-66 may be lost. `fixed`: the order of no sum
    depends on t, so that a row's bits depend on the row alone.
    """
    rows = len(codes)
    groups, out, inner = weight.shape
    made = torch.empty(rows, groups * out, dtype=torch.bfloat16, device=codes.device)
    if not rows:
        return made
    shape = shape_of(rows, out, inner, groups, fixed=fixed)
    if shape.widened:
        step = _step(inner)
        wide = _widened(codes, scales, 1, step, shape.pdl, laid=fixed)
        wide_weight = _widened(weight, weight_scales, 32, step, shape.pdl, laid=fixed)
        if not fixed:
            wide = wide.view(rows, groups, inner).transpose(0, 1)
            return torch.bmm(wide, wide_weight.mT).transpose(0, 1).reshape(rows, groups * out)
        _dense_laid[(cdiv(rows, shape.tile), cdiv(out, shape.height), groups)](
            wide, wide_weight, made, rows, K=inner, N=out, GROUPS=groups, SPLITS=shape.splits, STEP=step,
            ROWS=shape.height, TILE=shape.tile, PDL=shape.pdl, num_warps=shape.num_warps, num_stages=shape.num_stages,
            **options(shape.pdl),
        )  # fmt: skip
        return made
    each = _FIXED_ROWS if fixed else rows
    for start in range(0, rows, each):
        part = slice(start, start + each)
        _launch(codes[part], scales[part], weight, weight_scales, made[part], shape)
    return made
