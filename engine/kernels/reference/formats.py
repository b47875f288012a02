"""The number formats of kernels in torch: quantizers of values in groups. All arithmetic is float32.

e4m3 (largest 448), e2m1 (largest 6; two per byte, the even index in the low nibble), e8m0 (2^(code - 127)). Scales are
powers of two, except those of `q4kv`, which are e4m3. Codes are uint8 tensors.
"""

import torch

LEAST_Q8, LEAST_Q4, LEAST_Q4KV = 1e-4, 6 * 2.0**-126, 6 * 2.0**-9
"""Least magnitude maximum of a group, so that no scale is zero."""


def q8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes [..., n] and e8m0 codes [..., n / 32]."""
    grouped = values.float().unflatten(-1, (-1, 32))
    scales = exponent_ceil(grouped.abs().amax(-1).clamp(min=LEAST_Q8) * (1 / 448))
    return e4m3_code(grouped / power(scales)[..., None]).flatten(-2), scales


def q4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed e2m1 codes [..., n / 2] and e8m0 codes [..., n / 32]."""
    grouped = values.float().unflatten(-1, (-1, 32))
    scales = exponent_ceil(grouped.abs().amax(-1).clamp(min=LEAST_Q4) * (1 / 6))
    return pack(e2m1_code(grouped / power(scales)[..., None]).flatten(-2)), scales


def q4kv(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed e2m1 codes [..., n / 2] and e4m3 scales [..., n / 16]; multiplies by the rounded reciprocal."""
    grouped = values.float().unflatten(-1, (-1, 16))
    scales = e4m3_code(grouped.abs().amax(-1).clamp(min=LEAST_Q4KV) * (1 / 6))
    return pack(e2m1_code(grouped * e4m3_value(scales).reciprocal()[..., None]).flatten(-2)), scales


def decode_q8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 values [..., n]."""
    return (e4m3_value(codes).unflatten(-1, (-1, 32)) * power(scales)[..., None]).flatten(-2)


def decode_q4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 values [..., n]."""
    return (e2m1_value(codes).unflatten(-1, (-1, 32)) * power(scales)[..., None]).flatten(-2)


def decode_q4kv(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 values [..., n]."""
    return (e2m1_value(codes).unflatten(-1, (-1, 16)) * e4m3_value(scales)[..., None]).flatten(-2)


def exponent_ceil(values: torch.Tensor) -> torch.Tensor:
    """Return e8m0 codes of the least powers of two not below positive, normal values, by the bits of the float."""
    bits = values.to(torch.float32).contiguous().view(torch.int32)
    return ((bits >> 23) + (bits & 0x7FFFFF).ne(0)).to(torch.uint8)


def power(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 2^(code - 127) of codes 1..254."""
    return (codes.to(torch.int32) << 23).view(torch.float32)


def e4m3_code(values: torch.Tensor) -> torch.Tensor:
    """Return e4m3 codes, rounded to nearest even; larger magnitudes become 448."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_value(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 values of e4m3 codes."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def e2m1_code(values: torch.Tensor) -> torch.Tensor:
    """Return codes 0..15, ties to the even mantissa; larger magnitudes become 6."""
    size = values.abs()
    above = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0]
    return torch.stack(above).sum(0).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_value(packed: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., 2n] of packed codes [..., n]: without a table, which a recorded step could not upload."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.view(torch.float32).float() * 2.0**126


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return [..., n / 2] bytes of [..., n] codes 0..15."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return bfloat16 weight * x / sqrt(mean square + eps) over the last axis, computed in float32."""
    x = x.float()
    return (weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))).bfloat16()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Return bfloat16 x [t, ..., n] with its last pairs of neighbours rotated; `cos`, `sin` float32 [t, pairs]."""
    shape = (len(x), *(1,) * (x.dim() - 2), cos.shape[1])
    cos, sin = cos.view(shape), (-sin if inverse else sin).view(shape)
    plain, pairs = x.float().split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
    real, imaginary = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    both = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1).flatten(-2)
    return torch.cat((plain, both), -1).bfloat16()


def thirds(weight: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 [3, ...] whose sum is the float32 weight, largest part first."""
    high = weight.bfloat16()
    middle = (weight - high.float()).bfloat16()
    return torch.stack((high, middle, (weight - high.float() - middle.float()).bfloat16()))


_PLANE = -2118090304
"""Bits of two codes, one in each half of a word, where `_planes` has them: sign 15, exponent 8 and 7, mantissa 6."""


def tiled(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights as the grouped products read them: tiles of 64 rows and 128 columns, each in one piece.

    `packed` uint8 [E, R, K / 2] e2m1 pairs, `scales` uint8 [E, R, K / 32]; R a multiple of 64, K of 128. Returns int32
    [E, R / 64, K / 128, 64, 16] and uint8 [E, R / 64, K / 128, 64, 4]. Of two neighbouring words of eight codes, the
    first one gets both first halves, the second both second halves, so that `_planes` of it are those codes.
    """
    experts, rows, half = packed.shape
    codes = torch.stack((packed & 0xF, packed >> 4), -1).view(experts, rows, half // 8, 2, 2, 4).int()
    bits = ((codes & 8) << 12) | ((codes & 7) << 6)
    words = _word_of(*(bits[..., 0, :, :] | (bits[..., 1, :, :] << 16)).unbind(-1))
    words = words.view(experts, rows // 64, 64, half // 64, 16).transpose(2, 3).contiguous()
    return words, scales.view(experts, rows // 64, 64, half // 64, 4).transpose(2, 3).contiguous()


def untiled(words: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `tiled`."""
    experts, rows = len(words), words.shape[1] * 64
    planes = torch.stack(_planes(words.transpose(2, 3).reshape(experts, rows, -1, 2)), -1)
    both = torch.stack((planes & 0xFFFF, (planes >> 16) & 0xFFFF), -3)
    codes = ((both >> 12) & 8) | ((both >> 6) & 7)
    return pack(codes.flatten(2).to(torch.uint8)), scales.transpose(2, 3).reshape(experts, rows, -1)


def _planes(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the four pairs of codes of int32 words: a shift each, and a mask or a mask of a difference.

    So kernels unpack them; every word is some four pairs, and the other way round.
    """
    right = ((words >> 6) & 0x03FFFFFF) | (words << 26)
    moved = words << 6, right, words ^ (words << 4), words ^ ((words >> 2) & 0x3FFFFFFF)
    return tuple(plane & _PLANE for plane in moved)


def _word_of(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return the int32 words whose `_planes` these are: two lie bare in it, from which the differences are solved."""
    word = ((a >> 6) & 0x03FFFFFF) | (b << 6) | ((b >> 26) & 0x3F)
    word = word | ((d ^ ((word >> 2) & 0x3FFFFFFF)) & -2139062144)
    word = word | ((c ^ (word << 4)) & 0x00400040)
    word = word | (((d ^ word) << 2) & 0x01000100)
    word = word | (((d ^ word) << 2) & 0x04000400)
    return word | (((c ^ word) >> 4) & 0x08180818)


def expert_product(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [t, R]: rows [t, K] of few-bit values times one expert of `tiled` ([R / 64, K / 128, 64, ..]).

    A GPU multiplies in TF32, which takes such values without a rounding.
    """
    packed, spread = untiled(words[None], scales[None])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return x @ decode_q4(packed[0], spread[0]).T
    finally:
        torch.set_float32_matmul_precision(before)
