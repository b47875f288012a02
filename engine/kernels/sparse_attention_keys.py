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
        lifted = ((scales + 60).to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
        return _joined4(_bytes(words, tl.broadcast_to(lifted, (TILE, D // 32, 8))), TILE, D)
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
    """Return four bfloat16 tensors of the shape of `words` int32: bytes as e4m3, times 2^-120 of bfloat16 `scales`.

    Both values of a register are of one word: tensor k has at word 2 i + h the byte 2 k + h of words 2 i and 2 i + 1.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, b;
            prmt.b32 a, $4, 0, 0x1100; shl.b32 b, a, 4; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x07F007F0; or.b32 a, a, b; mul.rn.bf16x2 $0, a, $6;
            prmt.b32 a, $4, 0, 0x3322; shl.b32 b, a, 4; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x07F007F0; or.b32 a, a, b; mul.rn.bf16x2 $1, a, $6;
            prmt.b32 a, $5, 0, 0x1100; shl.b32 b, a, 4; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x07F007F0; or.b32 a, a, b; mul.rn.bf16x2 $2, a, $6;
            prmt.b32 a, $5, 0, 0x3322; shl.b32 b, a, 4; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x07F007F0; or.b32 a, a, b; mul.rn.bf16x2 $3, a, $6;
            }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, scales],
        dtype=(tl.bfloat16,) * 4,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _joined4(p, TILE: tl.constexpr, D: tl.constexpr):
    """Return [TILE, D] of what `_bytes` returns."""
    every = tl.reshape(tl.join(tl.join(p[0], p[2]), tl.join(p[1], p[3])), (TILE, D // 32, 4, 2, 4))
    return tl.reshape(tl.permute(every, (0, 1, 2, 4, 3)), (TILE, D))


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
        return _joined8(_nibbles(words, (scales * 7.378697629483821e19).to(tl.bfloat16)), TILE, D)  # times 2^66
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
    """Return eight bfloat16 tensors of the shape of `words` int32: nibbles as e2m1, times 2^-126 of bfloat16 `scales`.

    As `_bytes`: tensor k has at word 2 i + h the nibble 2 k + h of words 2 i and 2 i + 1, whose scales are equal.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, b, u, v;
            shf.l.wrap.b32 u, $8, $8, 4; shf.l.wrap.b32 v, $9, $9, 4;
            prmt.b32 a, u, $8, 0x4104; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $0, a, $10;
            prmt.b32 a, u, $8, 0x5215; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $1, a, $10;
            prmt.b32 a, u, $8, 0x6326; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $2, a, $10;
            prmt.b32 a, u, $8, 0x7037; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $3, a, $10;
            prmt.b32 a, v, $9, 0x4104; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $4, a, $10;
            prmt.b32 a, v, $9, 0x5215; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $5, a, $10;
            prmt.b32 a, v, $9, 0x6326; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $6, a, $10;
            prmt.b32 a, v, $9, 0x7037; shl.b32 b, a, 6; and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01C001C0; or.b32 a, a, b; mul.rn.bf16x2 $7, a, $10;
            }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [words, scales],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _joined8(p, TILE: tl.constexpr, D: tl.constexpr):
    """Return [TILE, D] of what `_nibbles` returns."""
    even = tl.join(tl.join(p[0], p[4]), tl.join(p[2], p[6]))
    odd = tl.join(tl.join(p[1], p[5]), tl.join(p[3], p[7]))
    every = tl.reshape(tl.join(even, odd), (TILE, D // 64, 4, 2, 8))
    return tl.reshape(tl.permute(every, (0, 1, 2, 4, 3)), (TILE, D))
