# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Packed keys of sparse attention as one bfloat16 tile, in the order of the head dimension."""

import triton
import triton.language as tl

from engine.kernels.device import e2m1_value, e4m3_value, power


@triton.jit
def window_keys(slot, valid, TILE: tl.constexpr, D: tl.constexpr, PTX: tl.constexpr):
    """Return bfloat16 [TILE, D], 2^-60 of the values of window rows at int32 pointers [TILE]; scales up to 2^67."""
    group = tl.arange(0, D // 32)
    word = group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    words = tl.load(slot[:, None, None] + word, mask=valid[:, None, None], other=0)
    at = slot.to(tl.pointer_type(tl.uint8))[:, None] + (D + group)[None, :]
    scales = tl.load(at, mask=valid[:, None], other=127).to(tl.int32)[:, :, None]
    if PTX:
        # Bits of e4m3 where bfloat16 has them are 2^-120 of the value, subnormals too.
        p0, p1 = _bytes(words, tl.broadcast_to(_doubled(power(scales + 60)), (TILE, D // 32, 8)))
        return tl.reshape(_pairs(tl.join(p0, p1)), (TILE, D))
    else:
        wide = power(scales - 60)
        even = tl.join(_value(words, wide), _value(words >> 16, wide))
        odd = tl.join(_value(words >> 8, wide), _value(words >> 24, wide))
        return tl.reshape(tl.join(even, odd), (TILE, D))


@triton.jit
def _value(words, scales):
    return (e4m3_value((words & 0xFF).to(tl.uint8)) * scales).to(tl.bfloat16)


@triton.jit
def _bytes(words, scales):
    """Return two int32 tensors of the shape of `words` int32: pairs of bytes as e4m3, as bfloat16 2^-120 of the values
    times bfloat16 scales, of which `scales` int32 hold two each.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, b;
            prmt.b32 a, $2, 0, 0x1100; shl.b32 b, a, 4; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x07F007F0; or.b32 a, a, b; mul.rn.bf16x2 $0, a, $3;
            prmt.b32 a, $2, 0, 0x3322; shl.b32 b, a, 4; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x07F007F0; or.b32 a, a, b; mul.rn.bf16x2 $1, a, $3;
            }""",
        "=&r,=&r,r,r",
        [words, scales],
        dtype=(tl.int32,) * 2,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _pairs(p):
    """Return bfloat16 [.., 2] of int32 that hold two each."""
    low, high = (p & 0xFFFF).to(tl.int16), (p >> 16).to(tl.int16)
    return tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))


@triton.jit
def _doubled(scales):
    """Return int32 that hold twice, as bfloat16, what positive float32 `scales` of as few bits are."""
    bits = scales.to(tl.int32, bitcast=True)
    return bits | (bits >> 16)


@triton.jit
def entry_words(entry, valid, D: tl.constexpr):
    """Return int32 [TILE, D / 64, 8] codes and [TILE, D / 64] scales of entries at int32 pointers [TILE]."""
    group = tl.arange(0, D // 64)
    word = group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    words = tl.load(entry[:, None, None] + word, mask=valid[:, None, None], other=0)
    return words, tl.load(entry[:, None] + (D // 8 + group)[None, :], mask=valid[:, None], other=0)


@triton.jit
def entry_keys(words, packed, TILE: tl.constexpr, D: tl.constexpr, PTX: tl.constexpr):
    """Return bfloat16 [TILE, D], 2^-60 of the values of what `entry_words` read."""
    code = ((packed[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 0xFF).to(tl.uint8)
    scales = _twice(e4m3_value(code), TILE, D)
    if PTX:
        p0, p1, p2, p3 = _nibbles(words, _doubled(scales * 7.378697629483821e19))  # times 2^66
        return tl.reshape(_pairs(tl.join(tl.join(p0, p2), tl.join(p1, p3))), (TILE, D))
    else:
        wide = scales * 8.673617379884035e-19  # 2^-60
        p0, p4 = _code(words, wide), _code(words >> 16, wide)
        p1, p5 = _code(words >> 4, wide), _code(words >> 20, wide)
        p2, p6 = _code(words >> 8, wide), _code(words >> 24, wide)
        p3, p7 = _code(words >> 12, wide), _code(words >> 28, wide)
        even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
        odd = tl.join(tl.join(p1, p5), tl.join(p3, p7))
        return tl.reshape(tl.join(even, odd), (TILE, D))


@triton.jit
def _twice(scales, TILE: tl.constexpr, D: tl.constexpr):
    """Return [TILE, D / 64, 8] of scales [TILE, D / 64, 4] of two words each."""
    return tl.reshape(tl.broadcast_to(scales[:, :, :, None], (TILE, D // 64, 4, 2)), (TILE, D // 64, 8))


@triton.jit
def _code(words, scales):
    return (e2m1_value(words & 15) * scales).to(tl.bfloat16)


@triton.jit
def _nibbles(words, scales):
    """Return four int32 tensors of the shape of `words` int32: pairs of nibbles as e2m1, as bfloat16 2^-126 of the values
    times bfloat16 scales, of which `scales` int32 hold two each.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, b, u;
            shf.l.wrap.b32 u, $4, $4, 4;
            prmt.b32 a, u, $4, 0x4104; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $0, a, $5;
            prmt.b32 a, u, $4, 0x5215; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $1, a, $5;
            prmt.b32 a, u, $4, 0x6326; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $2, a, $5;
            prmt.b32 a, u, $4, 0x7037; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $3, a, $5;
            }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, scales],
        dtype=(tl.int32,) * 4,
        is_pure=True,
        pack=1,
    )
