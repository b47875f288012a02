"""Published tensors as numbers: takes a tensor of a checkpoint by name and undoes its number format.

Knows formats by the types that tensors have, so experts in four and in eight bits read alike. Knows no layer.
"""

from typing import Protocol

import torch

from core.errors import CheckpointError
from engine.models.deepseek_v41.formats import e4m3_decode, e8m0_decode, unpack_nibbles
from engine.models.deepseek_v41.quantize import Q4

_GROUP = 32


class TensorSource(Protocol):
    """Where tensors come from."""

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor as published; raises `CheckpointError` naming it."""
        ...


class Tensors:
    """Numbers of one source in one compute dtype.

    What is published in float32 stays in float32 for a bfloat16 model: it is meant to be computed so.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype, block: tuple[int, int]) -> None:
        self._source = source
        self._block = block
        self.dtype = dtype
        self.wide = torch.float32 if dtype == torch.bfloat16 else dtype

    def raw(self, name: str) -> torch.Tensor:
        """Return the published bytes as uint8: a view, never a copy."""
        return self._source.get(name).view(torch.uint8)

    def integers(self, name: str) -> torch.Tensor:
        """Return an int64 table."""
        return self._source.get(name).long()

    def plain(self, name: str) -> torch.Tensor:
        """Return an unquantized tensor in the compute dtype."""
        return _finite(name, self._source.get(name)).to(self.dtype)

    def float(self, name: str) -> torch.Tensor:
        """Return a tensor that is computed with in float32 at least."""
        return _finite(name, self._source.get(name)).to(self.wide)

    def linear(self, name: str) -> torch.Tensor:
        """Return the weight [out, in] of a linear with scales by blocks."""
        return self._dense(name, self._source.get(f"{name}.weight"))

    def expert(self, name: str) -> torch.Tensor:
        """Return the weight [out, in] of an expert's linear: packed in four bits, or dense."""
        weight = self._source.get(f"{name}.weight")
        if weight.dtype == torch.float8_e4m3fn:
            return self._dense(name, weight)
        scale = self._source.get(f"{name}.scale").view(torch.uint8)
        values = Q4(_GROUP).decode(unpack_nibbles(weight.view(torch.uint8)), scale)
        return _finite(name, values).to(self.dtype)

    def _dense(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        rows, columns = self._block
        scale = _scale_values(self._source.get(f"{name}.scale"))
        spread = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)
        values = e4m3_decode(weight.view(torch.uint8)) * spread[:, : weight.shape[1]]
        return _finite(f"{name}.weight", values).to(self.dtype)


def _scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Return float32 scales; some checkpoints have them as numbers instead of exponents."""
    return scale if scale.dtype == torch.float32 else e8m0_decode(scale.view(torch.uint8))


def _finite(name: str, values: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"tensor {name} is corrupted: it has values that are not finite")
    return values
