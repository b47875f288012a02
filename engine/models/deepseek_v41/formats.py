"""Element formats of DeepSeek checkpoints and caches, bit by bit: e4m3, e2m1 (two per byte), e8m0.

Codes are uint8 tensors. Knows no groups and no scales of values; see `quantize`.
"""

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BORDERS = (0.25 + 2**-25, 0.75, 1.25 + 2**-23, 1.75, 2.5 + 2**-22, 3.5, 5.0 + 2**-21)
"""Least float32 magnitude of each code from 1 on: a tie if that code is even, else what comes right above the tie."""
_MANTISSA = 0x7FFFFF


def e4m3_encode(values: torch.Tensor) -> torch.Tensor:
    """Return e4m3 codes of the values, rounded in float32 to nearest even; larger magnitudes become 448."""
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 values of e4m3 codes; 0x7f and 0xff are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def e2m1_encode(values: torch.Tensor) -> torch.Tensor:
    """Return e2m1 codes 0..15 of finite values, rounded in float32, ties to the even mantissa, clamped to 6."""
    values = values.float()
    borders = torch.tensor(_E2M1_BORDERS, device=values.device)
    code = torch.bucketize(values.abs(), borders, out_int32=True, right=True)
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 values of e2m1 codes 0..15."""
    return torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)[codes.long()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return [..., n / 2] bytes of [..., n] codes 0..15; the even index goes into the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 2n] codes 0..15 of [..., n] bytes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def e8m0_ceil(values: torch.Tensor) -> torch.Tensor:
    """Return codes of the least power of two that is not less than each positive, normal float32 value.

    Reads the bits of the float; a logarithm may be off by one at exact powers of two.
    """
    bits = values.float().contiguous().view(torch.int32)
    return ((bits >> 23) + (bits & _MANTISSA).ne(0)).to(torch.uint8)


def power_ceil(values: torch.Tensor) -> torch.Tensor:
    """Return `e8m0_decode(e8m0_ceil(values))` of a contiguous float32 tensor."""
    return (values.view(torch.int32) + _MANTISSA).bitwise_and_(~_MANTISSA).view(torch.float32)


def e8m0_decode(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 values 2^(code - 127) of e8m0 codes; 255 is NaN."""
    return codes.view(torch.float8_e8m0fnu).float()
