# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Number formats inside kernels: e4m3, e2m1, e8m0 on registers. The specification is `reference.formats`."""

import triton
import triton.language as tl

LEAST_Q8 = tl.constexpr(1e-4)
LEAST_Q4 = tl.constexpr(6 * 2.0**-126)
LEAST_Q4KV = tl.constexpr(6 * 2.0**-9)
"""Least magnitude maximum of a group, so that no scale is zero."""


@triton.jit
def exponent_ceil(x):
    """Return int32 e8m0 codes of the least powers of two not below positive, normal float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def power(code):
    """Return float32 2^(code - 127) of int32 codes 1..254."""
    return (code << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(code):
    """Return float32 2^(127 - code) of int32 codes 1..253."""
    return ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """Return uint8 e4m3 codes of float32 values, to nearest even; larger magnitudes become 448."""
    return tl.clamp(x, -448.0, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(code):
    """Return float32 values of uint8 e4m3 codes."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_code(x):
    """Return int32 e2m1 codes 0..15 of finite float32 values: ties to the even mantissa, larger magnitudes become 6."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Below 1 codes are half steps, which the sum with 2^22 rounds to; above, one bit of mantissa is kept.
    small = (size + 4194304.0).to(tl.int32, bitcast=True) & 7
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    return tl.where(size < 1.0, small, large) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """Return float32 values of int32 e2m1 codes 0..15.

    The exponent field and the mantissa bit are put where float32 has them, so that code 1, the only subnormal, becomes
    one too; a product with 2^126 puts all of them into place.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def q8_code(grouped):
    """Return e4m3 codes uint8 and e8m0 codes int32 of float32 [..., groups, 32]; the scale is over the last axis."""
    most = tl.maximum(tl.max(tl.abs(grouped), axis=-1), LEAST_Q8)
    scale = exponent_ceil(most * (1 / 448.0))
    # No clamp: the scale is chosen so that no magnitude is above 448.
    codes = (grouped * tl.expand_dims(inverse_power(scale), -1)).to(tl.float8e4nv)
    return codes.to(tl.uint8, bitcast=True), scale


@triton.jit
def rotated(even, odd, cos, sin):
    """Return a pair turned, in float32, rounded to bfloat16 and back."""
    real = (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32)
    imaginary = (even * sin + odd * cos).to(tl.bfloat16).to(tl.float32)
    return real, imaginary


@triton.jit
def plane_scale(code):
    """Return bfloat16 2^(code - 61) of e8m0 codes 62..188: what `fp4_planes` multiplies with."""
    return ((code.to(tl.int16) + 66) << 7).to(tl.bfloat16, bitcast=True)


UNPLANED = tl.constexpr(2.0**60)
"""Planes of weights are 2^-60 of their values, which the other factor makes up for: so one product scales them."""


@triton.jit
def fp4_planes(words, scales, PTX: tl.constexpr):
    """Return eight bfloat16 tensors of the shape of `words` int32: nibble n of each word, e2m1, times 2^-60 * scale.

    `scales` are of `plane_scale`, equal for neighbouring words 2i and 2i + 1. Exact. On NVIDIA two words at a time:
    sign, exponent and mantissa bits are put where bfloat16 has them, which makes the value's 2^-126 (the only subnormal
    of e2m1 becomes one, too), and one packed product scales. `PTX`: whether that can be said.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y, a, b;
            prmt.b32 x, $8, $9, 0x5410;
            prmt.b32 y, $8, $9, 0x7632;
            shl.b32 a, x, 12;  and.b32 a, a, 0x80008000;  shl.b32 b, x, 6;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 $0, a, $10;
            shl.b32 a, x, 8;  and.b32 a, a, 0x80008000;  shl.b32 b, x, 2;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 $1, a, $10;
            shl.b32 a, x, 4;  and.b32 a, a, 0x80008000;  shr.b32 b, x, 2;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 $2, a, $10;
            and.b32 a, x, 0x80008000;  shr.b32 b, x, 6;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 $3, a, $10;
            shl.b32 a, y, 12;  and.b32 a, a, 0x80008000;  shl.b32 b, y, 6;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 $4, a, $10;
            shl.b32 a, y, 8;  and.b32 a, a, 0x80008000;  shl.b32 b, y, 2;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 $5, a, $10;
            shl.b32 a, y, 4;  and.b32 a, a, 0x80008000;  shr.b32 b, y, 2;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 $6, a, $10;
            and.b32 a, y, 0x80008000;  shr.b32 b, y, 6;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 $7, a, $10;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [words, scales],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        wide = scales.to(tl.float32) * 1.1754943508222875e-38
        return (
            _plane(words, wide), _plane(words >> 4, wide), _plane(words >> 8, wide), _plane(words >> 12, wide),
            _plane(words >> 16, wide), _plane(words >> 20, wide), _plane(words >> 24, wide), _plane(words >> 28, wide),
        )  # fmt: skip


@triton.jit
def _plane(words, scales):
    return (e2m1_value(words & 15) * scales).to(tl.bfloat16)


@triton.jit
def eight(x, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Return the planes of [ROWS, WORDS, 8], each [ROWS, WORDS]."""
    even, odd = tl.split(tl.reshape(x, (ROWS, WORDS, 2, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    p0, p4 = tl.split(a)
    p1, p5 = tl.split(b)
    p2, p6 = tl.split(c)
    p3, p7 = tl.split(d)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def arranged_planes(words, scales, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Return what `fp4_planes` does, of int32 [ROWS, 4, 4] whose bits are placed as `reference.formats.tiled` does.

    A shift and one operation bring a code's bits to their places. Threads must have words in pairs, as wide loads do.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            shl.b32 a, $8, 6;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $0, a, $10;
            shf.r.wrap.b32 a, $8, $8, 6;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $1, a, $10;
            shl.b32 a, $8, 4;  xor.b32 a, a, $8;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $2, a, $10;
            shr.b32 a, $8, 2;  xor.b32 a, a, $8;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $3, a, $10;
            shl.b32 a, $9, 6;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $4, a, $10;
            shf.r.wrap.b32 a, $9, $9, 6;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $5, a, $10;
            shl.b32 a, $9, 4;  xor.b32 a, a, $9;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $6, a, $10;
            shr.b32 a, $9, 2;  xor.b32 a, a, $9;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $7, a, $10;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [words, scales],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        first, second = tl.split(tl.reshape(words, (ROWS, 4, 2, 2)))
        wide = scales.to(tl.float32) * 1.1754943508222875e-38
        return (
            _arranged(first << 6, wide, ROWS), _arranged(((first >> 6) & 0x03FFFFFF) | (first << 26), wide, ROWS),
            _arranged(first ^ (first << 4), wide, ROWS), _arranged(first ^ ((first >> 2) & 0x3FFFFFFF), wide, ROWS),
            _arranged(second << 6, wide, ROWS), _arranged(((second >> 6) & 0x03FFFFFF) | (second << 26), wide, ROWS),
            _arranged(second ^ (second << 4), wide, ROWS), _arranged(second ^ ((second >> 2) & 0x3FFFFFFF), wide, ROWS),
        )  # fmt: skip


@triton.jit
def _arranged(moved, wide, ROWS: tl.constexpr):
    """Return a plane bfloat16 [ROWS, 4, 4] of words [ROWS, 4, 2]: halves have the bits of one code each in place."""
    bits = tl.join((moved & 0x81C0) << 16, moved & -2118123520)
    return (tl.reshape(bits, (ROWS, 4, 4)).to(tl.float32, bitcast=True) * 8.507059173023462e37 * wide).to(tl.bfloat16)


@triton.jit
def grouped_plane(x, ROWS: tl.constexpr):
    """Return a plane [ROWS, 2, 4, 2] of [ROWS, 4 groups, 4 words]: so a thread's words share one group's scale."""
    return tl.permute(tl.reshape(x, (ROWS, 4, 2, 2)), (0, 2, 1, 3))


@triton.jit
def joined_planes(p, ROWS: tl.constexpr):
    """Return [ROWS, 128] of eight planes [ROWS, 4, 4], one grouped plane after the other: no value leaves its thread.

    Element k of a row comes to [k % 8, k / 16 % 2, k / 32, k / 8 % 2] of [8, 2, 4, 2].
    """
    even = tl.join(
        tl.join(grouped_plane(p[0], ROWS), grouped_plane(p[4], ROWS)),
        tl.join(grouped_plane(p[2], ROWS), grouped_plane(p[6], ROWS)),
    )
    odd = tl.join(
        tl.join(grouped_plane(p[1], ROWS), grouped_plane(p[5], ROWS)),
        tl.join(grouped_plane(p[3], ROWS), grouped_plane(p[7], ROWS)),
    )
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 4, 5, 6, 1, 2, 3)), (ROWS, 128))


@triton.jit
def fp4_quarters(halves, scales, PTX: tl.constexpr):
    """Return four bfloat16 tensors of the shape of `halves` int16: nibble n of each, e2m1, times 2^-60 * scale. Exact.

    `scales` as `fp4_planes` has them, and the same places for bits. One product copies a code to where its sign and to
    where the rest belongs; what else it makes is masked.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            and.b32 a, $4, 0x000F000F;  mul.lo.u32 a, a, 0x1040;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $0, a, $5;
            and.b32 a, $4, 0x00F000F0;  mul.lo.u32 a, a, 0x104;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $1, a, $5;
            shr.b32 b, $4, 8;
            and.b32 a, b, 0x000F000F;  mul.lo.u32 a, a, 0x1040;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $2, a, $5;
            and.b32 a, b, 0x00F000F0;  mul.lo.u32 a, a, 0x104;  and.b32 a, a, 0x81C081C0;  mul.rn.bf16x2 $3, a, $5;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [halves, scales],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=2,
        )
    else:
        words = halves.to(tl.int32)
        wide = scales.to(tl.float32) * 1.1754943508222875e-38
        return _plane(words, wide), _plane(words >> 4, wide), _plane(words >> 8, wide), _plane(words >> 12, wide)


@triton.jit
def grouped_quarter(x, ROWS: tl.constexpr):
    """Return a quarter [ROWS, 4, 4, 2] of [ROWS, 4 groups, 8 halves]: so a thread's halves share one group's scale."""
    return tl.permute(tl.reshape(x, (ROWS, 4, 4, 2)), (0, 2, 1, 3))


@triton.jit
def joined_quarters(q, ROWS: tl.constexpr):
    """Return [ROWS, 128] of four quarters [ROWS, 4, 8], one after the other, grouped: no value leaves its thread.

    Element k of a row comes to [k % 4, k / 8 % 4, k / 32, k / 4 % 2] of [4, 4, 4, 2].
    """
    even = tl.join(grouped_quarter(q[0], ROWS), grouped_quarter(q[2], ROWS))
    odd = tl.join(grouped_quarter(q[1], ROWS), grouped_quarter(q[3], ROWS))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 4, 5, 1, 2, 3)), (ROWS, 128))


@triton.jit
def all_agree(x, most, PTX: tl.constexpr):
    """Return whether int32 x, the same in all threads, is at most `most`, by a vote: so the compiler knows it, too.

    Behind a branch that threads might part at it keeps addresses of products a thread, not a warp.
    """
    if PTX:
        agreed = tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.le.s32 p, $1, $2;  vote.sync.all.pred p, p, 0xffffffff;  selp.s32 $0, 1, 0, p;
            }""",
            "=r,r,r",
            [x, most],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return agreed != 0
    else:
        return x <= most


@triton.jit
def settled(sums, PTX: tl.constexpr):
    """Return float32 `sums` of products, all of them done: what a loop ends with whose products have a factor in registers.

    Triton leaves the last product of a pass open when only the next pass needs its sum, while that pass already writes the
    registers of its factor (seen on an H200: rows of garbage, other ones each time). It waits ahead of any other use.
    """
    if PTX:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return sums


@triton.jit
def store_normed(normed, OUT, CODES, SCALES, row, start, D: tl.constexpr, CHUNK: tl.constexpr):
    """Store bfloat16 [CHUNK] at columns `start` .. of a row of D, and what a quantized linear reads of it."""
    at = start + tl.arange(0, CHUNK)
    tl.store(OUT + row * D + at, normed, mask=at < D)
    codes, scales = q8_code(tl.reshape(normed.to(tl.float32), (CHUNK // 32, 32)))
    tl.store(CODES + row * D + at, tl.reshape(codes, (CHUNK,)), mask=at < D)
    group = start // 32 + tl.arange(0, CHUNK // 32)
    tl.store(SCALES + row * (D // 32) + group, scales.to(tl.uint8), mask=group < D // 32)
