# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Linears of e4m3 weights with a power of two per block of 32 x 32, over rows quantized in groups of 32.

Products of 32 elements along K go through the matrix unit as they are stored, and both powers of two are taken into their
float32 sum: nothing is unpacked. Weights are the rows of the product: they are what decoding reads. Groups of rows and
weights that belong together (a block-diagonal weight) are one launch. Where few programs would read, K is cut in parts,
whose sums a second kernel adds in their order. Many rows are widened to bfloat16, which is exact, for the vendor's product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import chip
from engine.kernels.device import UNPLANED, e4m3_value, power, settled
from engine.kernels.overlap import after_kernels_before, fetch_ahead, options, overlaps

_PROGRAMS = 264
"""K is cut until there are so many programs, two a multiprocessor."""
_MOST_SPLITS = 16
_FIXED_TILE = 32
_MANY_ROWS = 160
"""From so many rows on, widening the weights costs less than the vendor's product wins."""


class Shape(NamedTuple):
    """What the launcher chooses."""

    height: int
    """Rows of weights a program has, 64 or 128."""
    tile: int
    """Rows of activations a program has."""
    splits: int
    """Parts of K."""
    widened: bool
    """Through bfloat16 and the vendor's product."""
    num_warps: int
    num_stages: int
    pdl: bool
    folded: bool = False
    """Powers of two go into factors of bfloat16, not into sums."""
    ahead: bool = False
    """Rows are widened by a kernel of their own; if folded."""
    step: int = 128
    """Columns of a pass; if folded."""
    parts: int = 1
    """Products of a pass, 1 or, if rows are widened ahead, 2."""
    fetched: int = 0
    """Passes whose weights are asked for before earlier kernels are waited for; if folded."""
    joined: bool = False
    """The last program of a tile adds its parts, no second kernel; if rows are widened ahead."""
    block: int = 1024
    """Results that a program of the second kernel adds, 256 a warp."""


def shape_of(rows: int, out: int, inner: int, groups: int, *, fixed: bool) -> Shape:
    """Return the shape for sizes; `fixed`: it does not depend on `rows`."""
    if rows >= _MANY_ROWS and not fixed:
        return Shape(128, 128, 1, widened=True, num_warps=8, num_stages=3, pdl=overlaps())
    tile = _FIXED_TILE if fixed else max(16, min(128, triton.next_power_of_2(rows)))
    programs = triton.cdiv(out, 64) * groups * (1 if fixed else triton.cdiv(rows, tile))
    steps = inner // (256 if inner % 256 == 0 else 32)
    parts = [s for s in range(1, _MOST_SPLITS + 1) if steps % s == 0]
    splits = next((s for s in parts if programs * s >= _PROGRAMS), parts[-1])
    return Shape(64, tile, splits, widened=False, num_warps=4, num_stages=4, pdl=overlaps())


@triton.jit
def _dense_linear(
    X, S, W, WS, OUT, count, K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    PACK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    group, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    here, exists = n < N, row < count
    inside = tl.arange(0, 32)
    # Scales of PACK groups of 32 are one word.
    word = tl.int32 if PACK == 4 else tl.uint8
    codes = tl.pointer_type(tl.float8e4nv)
    weight = W.to(codes) + (group * N + n).to(tl.int64)[:, None] * K
    weight_scale = WS.to(tl.pointer_type(word)) + (group * tl.cdiv(N, 32) + n // 32) * (K // 32 // PACK)
    x = X.to(codes) + row.to(tl.int64)[:, None] * (GROUPS * K) + group * K
    x_scale = S.to(tl.pointer_type(word)) + row.to(tl.int64) * (GROUPS * K // 32 // PACK) + group * (K // 32 // PACK)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(split * (K // SPLITS), (split + 1) * (K // SPLITS), 32 * PACK):
        scales = tl.load(weight_scale + start // (32 * PACK), mask=here, other=0).to(tl.int32)
        x_scales = tl.load(x_scale + start // (32 * PACK), mask=exists, other=0).to(tl.int32)
        for i in tl.static_range(PACK):
            k = start + 32 * i + inside
            left = tl.load(weight + k[None, :], mask=here[:, None], other=0.0)
            right = tl.load(x + k[None, :], mask=exists[:, None], other=0.0)
            product = tl.dot(left, tl.trans(right))
            scale = power((scales >> (8 * i)) & 0xFF)[:, None]
            total += product * power((x_scales >> (8 * i)) & 0xFF)[None, :] * scale
    if SPLITS == 1:
        out = OUT + row.to(tl.int64)[:, None] * (GROUPS * N) + group * N + n[None, :]
        tl.store(out, tl.trans(total).to(tl.bfloat16), mask=exists[:, None] & here[None, :])
    else:
        out = OUT + (split.to(tl.int64) * count + row)[:, None] * (GROUPS * N) + group * N + n[None, :]
        tl.store(out, tl.trans(total), mask=exists[:, None] & here[None, :])


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


@triton.jit
def _folded(
    X, S, W, WS, OUT, MADE, COUNTS, count, K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    JOINED: tl.constexpr, STEP: tl.constexpr, PACK: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, FETCHED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = K // STEP
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    group, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    here, exists = n < N, row < count
    # Weights that do not exist are others, which saves predicates.
    held = n if N % ROWS == 0 else tl.minimum(n, N - 1)
    weight = (group * N + held).to(tl.int64)[:, None] * K
    if FETCHED > 0:
        line = split * STEPS // SPLITS * STEP + STEP * tl.arange(0, FETCHED)
        fetch_ahead(W + weight + tl.minimum(line, K - 1)[None, :])
    after_kernels_before(PDL)
    # Where four powers are one load, it is wide enough to be made ahead of its pass.
    word = tl.int32 if PACK == 4 else tl.uint8
    pairs, scales = tl.arange(0, STEP // 2)[None, :], tl.arange(0, STEP // 32 // PACK)[None, :]
    weight = W.to(tl.pointer_type(tl.int16)) + weight // 2 + pairs
    weight_scale = (group * tl.cdiv(N, 32) + held // 32)[:, None] * (K // 32 // PACK) + scales
    weight_scale = WS.to(tl.pointer_type(word)) + weight_scale
    # Of rows, too, bfloat16 in the order of `_factor` or two codes.
    x = row.to(tl.int64)[:, None] * (GROUPS * K) + group * K
    rows = X + x + tl.arange(0, STEP // PARTS)[None, :] if AHEAD else X.to(tl.pointer_type(tl.int16)) + x // 2 + pairs
    row_scale = S.to(tl.pointer_type(word)) + x // (32 * PACK) + scales
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(split * STEPS // SPLITS * STEP, (split + 1) * STEPS // SPLITS * STEP, STEP):
        codes = tl.load(weight + start // 2)
        powers = tl.load(weight_scale + start // (32 * PACK))
        if AHEAD and PARTS == 2:
            # The odd are unpacked while the even are multiplied.
            right = tl.load(rows + start, mask=exists[:, None], other=0.0)
            total = tl.dot(_factor(codes, powers, False, ROWS, STEP, PTX), tl.trans(right), total)
            right = tl.load(rows + start + STEP // 2, mask=exists[:, None], other=0.0)
            total = tl.dot(_factor(codes, powers, True, ROWS, STEP, PTX), tl.trans(right), total)
        else:
            left = _both(codes, powers, ROWS, STEP, PTX)
            if AHEAD:
                right = tl.load(rows + start, mask=exists[:, None], other=0.0)
            else:
                codes = tl.load(rows + start // 2, mask=exists[:, None], other=0)
                powers = tl.load(row_scale + start // (32 * PACK), mask=exists[:, None], other=0)
                right = _both(codes, powers, TILE, STEP, PTX)
            total = tl.dot(left, tl.trans(right), total)
        total = settled(total, PTX)
    total *= UNPLANED
    place = (row.to(tl.int64) * (GROUPS * N) + group * N)[:, None] + n[None, :]
    inside = exists[:, None] & here[None, :]
    total = tl.trans(total)
    if SPLITS == 1:
        tl.store(OUT + place, total.to(tl.bfloat16), mask=inside)
    else:
        size = count.to(tl.int64) * (GROUPS * N)
        tl.store(OUT + split * size + place, total, mask=inside)
        if JOINED:
            tile = (group * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
            _join(OUT + place, size, MADE + place, COUNTS + tile, inside, SPLITS, ROWS, TILE)


@triton.jit
def _join(parts, size, made, count, inside, SPLITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    # All threads have stored; what others stored is read past the first-level cache.
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.zeros((TILE, ROWS), tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(parts + part * size, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(made, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _spread(
    X, S, OUT, COUNTS, K: tl.constexpr, STEP: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_kernels_before(PDL)
    if TILES > 0:
        tile = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK)
        tl.store(COUNTS + tile, tl.zeros((BLOCK,), tl.int32), mask=tile < TILES)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    scales = tl.load(S + row * (K // 32) + group, mask=group < K // 32, other=127).to(tl.int32)
    values = tl.reshape(e4m3_value(tl.load(X + row * K + at, mask=at < K, other=0)), (BLOCK // 32, 32))
    values = (values * power(scales)[:, None] * 9.313225746154785e-10).to(tl.bfloat16)
    values = tl.permute(tl.reshape(values, (BLOCK // STEP, STEP // 2, 2)), (0, 2, 1))
    tl.store(OUT + row * K + at, tl.reshape(values, (BLOCK,)), mask=at < K)


@triton.jit
def _sum_parts(PARTS, OUT, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_kernels_before(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(PARTS + split * count + at, mask=at < count, other=0.0)
    tl.store(OUT + at, total.to(tl.bfloat16), mask=at < count)


@triton.jit
def _widen(
    CODES, SCALES, OUT, K: tl.constexpr, N: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    scale_row = row // N * tl.cdiv(N, HEIGHT) + row % N // HEIGHT
    scales = tl.load(SCALES + scale_row * (K // 32) + at // 32, mask=inside, other=127)
    values = e4m3_value(tl.load(CODES + row * K + at, mask=inside, other=0)) * power(scales.to(tl.int32))
    tl.store(OUT + row * K + at, values.to(tl.bfloat16), mask=inside)


def _widened(codes: torch.Tensor, scales: torch.Tensor, height: int, pdl: bool) -> torch.Tensor:
    """Return bfloat16 [.., n, k] of e4m3 codes [.., n, k] whose scales [.., ceil(n / height), k / 32] serve `height` rows."""
    rows, inner = codes.shape[-2:]
    made = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    block = min(2048, triton.next_power_of_2(inner))
    grid = (codes.numel() // inner, triton.cdiv(inner, block))
    _widen[grid](codes, scales, made, K=inner, N=rows, HEIGHT=height, BLOCK=block, PDL=pdl, num_warps=4, **options(pdl))
    return made


def _launch(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, target: torch.Tensor,
    shape: Shape,
) -> None:  # fmt: skip
    groups, out, inner = weight.shape
    _dense_linear[(triton.cdiv(out, shape.height), triton.cdiv(len(codes), shape.tile), groups * shape.splits)](
        codes, scales, weight, weight_scales, target, len(codes), K=inner, N=out, GROUPS=groups, SPLITS=shape.splits,
        PACK=4 if inner // shape.splits % 128 == 0 else 1, ROWS=shape.height, TILE=shape.tile,
        PDL=shape.pdl, num_warps=shape.num_warps, num_stages=shape.num_stages, **options(shape.pdl),
    )  # fmt: skip


def _launch_folded(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, target: torch.Tensor,
    made: torch.Tensor, shape: Shape,
) -> None:  # fmt: skip
    rows, width = codes.shape
    groups, out, inner = weight.shape
    step = min(shape.step, inner & -inner)
    grid = (triton.cdiv(rows, shape.tile), triton.cdiv(out, shape.height), groups * shape.splits)
    counts = made
    if shape.ahead:
        block = min(1024, triton.next_power_of_2(width))
        spread = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
        tiles = grid[0] * grid[1] * groups if shape.joined and shape.splits > 1 else 0
        counts = torch.empty(tiles, dtype=torch.int32, device=codes.device)
        _spread[(rows, triton.cdiv(width, block))](
            codes, scales, spread, counts, K=width, STEP=step, TILES=tiles, BLOCK=block, PDL=shape.pdl, num_warps=4,
            **options(shape.pdl),
        )  # fmt: skip
        codes = spread
    _folded[grid](
        codes, scales, weight, weight_scales, target, made, counts, rows, K=inner, N=out, GROUPS=groups,
        SPLITS=shape.splits, JOINED=shape.joined and shape.ahead, STEP=step, PACK=4 if step == 128 else 1, PARTS=shape.parts, AHEAD=shape.ahead,
        FETCHED=shape.fetched if shape.pdl else 0, ROWS=shape.height, TILE=shape.tile, PTX=chip.speaks_ptx(),
        PDL=shape.pdl, num_warps=shape.num_warps, num_stages=shape.num_stages, **options(shape.pdl),
    )  # fmt: skip


def dense_linear(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, *, fixed: bool = False
) -> torch.Tensor:
    """Return bfloat16 [t, G n]: group g of every row times weight g.

    `codes` uint8 [t, G k] (e4m3), `scales` uint8 [t, G k / 32] (e8m0) of rows; `weight` uint8 [G, n, k], `weight_scales`
    uint8 [G, ceil(n / 32), k / 32]; all contiguous, k a multiple of 32, scales at addresses that are multiples of 4.
    Products are exact; 32 of them are summed as the matrix unit does (on Hopper with 13 bits below the largest), those
    sums in float32 along k, one rounding. `fixed`: tiles do not depend on t, so that a row's bits depend on the row alone.
    """
    rows = len(codes)
    groups, out, inner = weight.shape
    made = torch.empty(rows, groups * out, dtype=torch.bfloat16, device=codes.device)
    if not rows:
        return made
    shape = shape_of(rows, out, inner, groups, fixed=fixed)
    if shape.widened:
        wide = _widened(codes, scales, 1, shape.pdl).view(rows, groups, inner).transpose(0, 1)
        wide_weight = _widened(weight, weight_scales, 32, shape.pdl)
        return torch.bmm(wide, wide_weight.mT).transpose(0, 1).reshape(rows, groups * out)
    split = shape.splits > 1
    target = torch.empty(shape.splits, *made.shape, dtype=torch.float32, device=codes.device) if split else made
    if shape.folded:
        _launch_folded(codes, scales, weight, weight_scales, target, made, shape)
    else:
        _launch(codes, scales, weight, weight_scales, target, shape)
    if split and not (shape.folded and shape.joined and shape.ahead):
        block = shape.block
        _sum_parts[(triton.cdiv(made.numel(), block),)](
            target, made, made.numel(), SPLITS=shape.splits, BLOCK=block, PDL=shape.pdl, num_warps=max(1, block // 256),
            **options(shape.pdl),
        )  # fmt: skip
    return made
