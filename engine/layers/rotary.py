"""Rotary position embedding (half-split pairs) with the published context scalings.

Angles are tabulated once per model, in float32 as the models were trained (float64 for float64 models), so a position
always gets the same bits. Knows no configuration file; see `engine.models.config` for the names there.
"""

import math
from typing import Annotated

import msgspec
import torch
from msgspec import Meta


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How frequencies are stretched. Fields that a kind does not use are ignored."""

    kind: str = "default"
    """default | linear (all positions alike) | banded (only long waves, blended in between) | yarn"""
    factor: Annotated[float, Meta(ge=1)] = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def inverse_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling, dtype: torch.dtype) -> torch.Tensor:
    """Return [rotary_dim / 2] radians per position."""
    inverse = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=dtype) / rotary_dim)
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "banded":
        return _banded(inverse, scaling)
    if scaling.kind == "yarn":
        return _yarn(inverse, rotary_dim, theta, scaling)
    return inverse


def _banded(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    stretched = torch.where(wavelength > original / low, inverse / scaling.factor, blended)
    return torch.where(wavelength < original / high, inverse, stretched)


def _yarn(inverse: torch.Tensor, dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        return dim * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high
    ramp = ((torch.arange(dim // 2, dtype=inverse.dtype) - low) / (high - low)).clamp(0, 1)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)


def magnitude(scaling: RopeScaling) -> float:
    """Return the factor on sine and cosine (YaRN's attention temperature); 1 for other kinds."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return of(scaling.mscale) / of(scaling.mscale_all_dim)
    return of(1.0)


class Rotary:
    """Tables of cosine and sine for positions 0..max_positions - 1."""

    def __init__(
        self, rotary_dim: int, max_positions: int, theta: float, scaling: RopeScaling, dtype: torch.dtype
    ) -> None:
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        inverse = inverse_frequencies(rotary_dim, theta, scaling, exact)
        angles = torch.outer(torch.arange(max_positions, dtype=exact), inverse)
        self._cos = (angles.cos() * magnitude(scaling)).to(dtype)
        self._sin = (angles.sin() * magnitude(scaling)).to(dtype)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine [max_positions, rotary_dim / 2] on a device: the same bits on every one."""
        return self._cos.to(device), self._sin.to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine [t, 1, rotary_dim / 2] of int64 positions [t]; once per step, for all layers."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [t, heads, head_dim] in half-split pairs (i, i + head_dim / 2); cos and sin from `Rotary.at`."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
