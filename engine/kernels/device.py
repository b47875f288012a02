# pyright: basic, reportArgumentType=false
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
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


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
def e8m0_bf16(code):
    """Return bfloat16 2^(code - 127) of uint8 codes 1..254."""
    return (code.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp4_values(codes, scales, PTX: tl.constexpr):
    """Return the values, bfloat16 even and odd, of packed e2m1 pairs uint8 times bfloat16 scales of the same shape.

    Exact wherever the product is a bfloat16. On NVIDIA four bytes at a time: exponent and mantissa bits are put where
    bfloat16 has them, 2^126 lifts them (the only subnormal too), the scale follows. `PTX`: whether that can be said.
    """
    if PTX:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y, a, b, lift;
            mov.b32 lift, 0x7E807E80;
            prmt.b32 x, $4, 0, 0x4140;
            prmt.b32 y, $4, 0, 0x4342;
            shl.b32 a, x, 12;  and.b32 a, a, 0x80008000;  shl.b32 b, x, 6;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 a, a, lift;  mul.rn.bf16x2 $0, a, $5;
            shl.b32 a, y, 12;  and.b32 a, a, 0x80008000;  shl.b32 b, y, 6;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 a, a, lift;  mul.rn.bf16x2 $1, a, $6;
            shl.b32 a, x, 8;  and.b32 a, a, 0x80008000;  shl.b32 b, x, 2;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 a, a, lift;  mul.rn.bf16x2 $2, a, $5;
            shl.b32 a, y, 8;  and.b32 a, a, 0x80008000;  shl.b32 b, y, 2;  and.b32 b, b, 0x01C001C0;
            or.b32 a, a, b;  mul.rn.bf16x2 a, a, lift;  mul.rn.bf16x2 $3, a, $6;
            }""",
            "=r,=r,=r,=r,r,r,r",
            [codes, scales],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = scales.to(tl.float32)
        even = (e2m1_value(codes.to(tl.int32) & 15) * wide).to(tl.bfloat16)
        odd = (e2m1_value(codes.to(tl.int32) >> 4) * wide).to(tl.bfloat16)
    return even, odd
