"""Weights in their published bits, fused and stacked the way kernels read them: codes and scales, never numbers.

Dense weights of one input become one matrix; a rank's experts become one tensor. Scales of blocks may be spread to one
per row and group, which is what matrix units take. Knows no kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.errors import CheckpointError, InvariantError
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.formats import unpack_nibbles
from engine.models.deepseek_v41.quantize import Q4, decode_blocks
from engine.models.deepseek_v41.tensors import TensorSource

_GROUP = 32


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A dense weight [out, in] in e4m3 with a power of two per block."""

    codes: torch.Tensor  # uint8 [out, in]
    scales: torch.Tensor  # uint8 [ceil(out / rows), ceil(in / columns)]
    block: tuple[int, int]

    def row_scales(self) -> torch.Tensor:
        """Return uint8 [out, ceil(in / columns)]: the block's scale for each row."""
        return self.scales.repeat_interleave(self.block[0], 0)[: self.codes.shape[0]]

    def decode(self) -> torch.Tensor:
        """Return the float32 weight."""
        return decode_blocks(self.codes, self.scales, self.block)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Stacked experts in e2m1, two per byte along the inner dimension, with a power of two per row and 32 values.

    E experts, I inner width, d hidden.
    """

    w13: torch.Tensor  # uint8 [E, 2 * I, d / 2]: w1, then w3
    w13_scales: torch.Tensor  # uint8 [E, 2 * I, d / 32]
    w2: torch.Tensor  # uint8 [E, d, I / 2]
    w2_scales: torch.Tensor  # uint8 [E, d, I / 32]

    def decode(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return w13 and w2 of one expert as float32."""
        return (
            Q4(_GROUP).decode(unpack_nibbles(self.w13[expert]), self.w13_scales[expert]),
            Q4(_GROUP).decode(unpack_nibbles(self.w2[expert]), self.w2_scales[expert]),
        )


def read_linear(source: TensorSource, names: Sequence[str], block: tuple[int, int]) -> PackedLinear:
    """Return dense weights of the same input as one, in the order of `names`; raises `CheckpointError`.

    All but the last must have whole blocks of rows.
    """
    codes = [source.get(f"{name}.weight").view(torch.uint8) for name in names]
    scales = [_exponents(f"{name}.scale", source.get(f"{name}.scale")) for name in names]
    for name, part in zip(names[:-1], codes, strict=False):
        if part.shape[0] % block[0]:
            raise InvariantError(f"{name} has {part.shape[0]} rows, which are no whole blocks of {block[0]}")
    return PackedLinear(torch.cat(codes), torch.cat(scales), block)


def read_experts(source: TensorSource, at: str, which: range, config: V41Config) -> PackedExperts:
    """Return the experts `which` below `at` ("layers.3.ffn"), copied one by one; raises `CheckpointError`."""
    hidden, inner, count = config.hidden_size, config.moe.inner_size, len(which)
    packed = PackedExperts(
        w13=torch.empty(count, 2 * inner, hidden // 2, dtype=torch.uint8),
        w13_scales=torch.empty(count, 2 * inner, hidden // _GROUP, dtype=torch.uint8),
        w2=torch.empty(count, hidden, inner // 2, dtype=torch.uint8),
        w2_scales=torch.empty(count, hidden, inner // _GROUP, dtype=torch.uint8),
    )
    for i, expert in enumerate(which):
        name = f"{at}.experts.{expert}"
        for half, part in enumerate(("w1", "w3")):
            rows = slice(half * inner, (half + 1) * inner)
            packed.w13[i, rows], packed.w13_scales[i, rows] = _four_bits(source, f"{name}.{part}")
        packed.w2[i], packed.w2_scales[i] = _four_bits(source, f"{name}.w2")
    return packed


def _four_bits(source: TensorSource, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    weight = source.get(f"{name}.weight")
    if weight.dtype == torch.float8_e4m3fn:
        raise CheckpointError(f"tensor {name}.weight has eight bits; only experts of four bits are kept packed")
    return weight.view(torch.uint8), source.get(f"{name}.scale").view(torch.uint8)


def _exponents(name: str, scale: torch.Tensor) -> torch.Tensor:
    """Return e8m0 codes; scales that are numbers must be powers of two."""
    if scale.dtype != torch.float32:
        return scale.view(torch.uint8)
    bits = scale.view(torch.int32)
    if bool((bits & 0x7FFFFF).any()) or bool((bits < 0).any()):
        raise CheckpointError(f"tensor {name} has scales that are no powers of two")
    return (bits >> 23).to(torch.uint8)
