"""Quantizers: values to codes and scales by groups of the last dimension, and dense weights by blocks.

All arithmetic is float32 whatever comes in, and dequantization is exact in float32 (and in bfloat16), so a cache of
codes reads the same as one of rounded values. Knows no cache layout and no model.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.deepseek_v41.formats import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    e8m0_ceil,
    e8m0_decode,
    power_ceil,
)

_LEAST_Q8, _LEAST_Q4, _LEAST_Q4KV = 1e-4, 6 * 2.0**-126, 6 * 2.0**-9
"""Least magnitude maximum of a group, so that no scale is zero."""


class Quantizer(Protocol):
    """Rounds values in groups that share a scale."""

    @property
    def group(self) -> int:
        """Values of the last dimension that share a scale."""
        ...

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return element codes uint8 [..., n] and scale codes uint8 [..., n / group] of finite values [..., n]."""
        ...

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return float32 values [..., n]."""
        ...

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return float32 `decode(*encode(values))`."""
        ...


def fake(quantizer: Quantizer, values: torch.Tensor) -> torch.Tensor:
    """Return what is read back after quantizing, in the dtype of `values`."""
    return quantizer.rounded(values).to(values.dtype)


@dataclass(frozen=True, slots=True)
class Q8:
    """e4m3 with a power of two per group: inputs of quantized linears, window rows."""

    group: int = 32

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = _grouped(values, self.group)
        codes = e8m0_ceil(_magnitude(grouped, _LEAST_Q8) * (1 / E4M3_MAX))
        return e4m3_encode(grouped / e8m0_decode(codes)[..., None]).flatten(-2), codes

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return _scaled(e4m3_decode(codes), e8m0_decode(scales), self.group)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        # Every input of a quantized linear comes through here: scales stay floats, and elements never become codes.
        grouped = _grouped(values, self.group)
        scales = power_ceil(grouped.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_Q8) * (1 / E4M3_MAX))
        codes = (grouped / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return (codes.float() * scales).flatten(-2)


@dataclass(frozen=True, slots=True)
class Q4:
    """e2m1 with a power of two per group: index queries and keys, routed experts."""

    group: int = 32

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = _grouped(values, self.group)
        codes = e8m0_ceil(_magnitude(grouped, _LEAST_Q4) * (1 / E2M1_MAX))
        return e2m1_encode(grouped / e8m0_decode(codes)[..., None]).flatten(-2), codes

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return _scaled(e2m1_decode(codes), e8m0_decode(scales), self.group)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return self.decode(*self.encode(values))


@dataclass(frozen=True, slots=True)
class Q4Kv:
    """e2m1 with an e4m3 scale per group: compressed entries.

    Values are multiplied by the rounded reciprocal of the scale, as the model was trained, not divided by it: the two
    differ at ties when the scale's significand is 15/8.
    """

    group: int = 16

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = _grouped(values, self.group)
        codes = e4m3_encode(_magnitude(grouped, _LEAST_Q4KV) * (1 / E2M1_MAX))
        return e2m1_encode(grouped * e4m3_decode(codes).reciprocal()[..., None]).flatten(-2), codes

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return _scaled(e2m1_decode(codes), e4m3_decode(scales), self.group)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return self.decode(*self.encode(values))


def encode_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes uint8 [out, in] and e8m0 codes uint8 [ceil(out / rows), ceil(in / columns)] of a weight."""
    rows, columns = block
    out, inner = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inner % columns, 0, -out % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    most = tiles.abs().amax((1, 3)).clamp(min=_LEAST_Q8)
    scales = e8m0_ceil(most * (1 / E4M3_MAX))
    return e4m3_encode(weight.float() / _spread(scales, block, (out, inner))), scales


def decode_blocks(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the float32 weight [out, in]."""
    out, inner = codes.shape
    return e4m3_decode(codes) * _spread(scales, block, (out, inner))


def _spread(scales: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    spread = e8m0_decode(scales).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]


def _grouped(values: torch.Tensor, group: int) -> torch.Tensor:
    return values.float().unflatten(-1, (-1, group))


def _magnitude(grouped: torch.Tensor, least: float) -> torch.Tensor:
    return grouped.abs().amax(-1).clamp(min=least)


def _scaled(elements: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    return (elements.unflatten(-1, (-1, group)) * scales[..., None]).flatten(-2)
