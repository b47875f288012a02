"""How numbers are treated, the same for every block of a model: which values pass through a published format.

Fake quantization is part of the trained model: a value read back from a cache, and a value that enters a quantized
linear, is the nearest one of its format. Both can be switched off, for conformity with models that have neither. A
packed cache yields what `window_row`, `entry_row` and `index_row` return. Holds switches only, no weights.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.packing import RowFormat, RowFormats, row_formats
from engine.models.deepseek_v41.quantize import Q8, Quantizer, fake

_TABLE = Q8(32)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The switches of one model."""

    formats: RowFormats
    activations: Quantizer | None
    """What values pass through that enter a quantized linear; None: nothing."""
    caches: bool
    """Window rows, entries, index keys and index queries pass through their cache formats."""
    quantized_output: bool
    """The grouped output projection is a quantized linear (the vendor's engine), not a plain one (the reference)."""
    fixed_shapes: bool = False
    """The shape of no matrix product depends on values. For callers that also fix the number of rows (A14)."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x W^T of [t, in] and [out, in]."""
        return functional.linear(x, weight)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a quantized linear sees of x [..., in]."""
        return x if self.activations is None else fake(self.activations, x)

    def quantized_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x W^T for a weight that the checkpoint keeps in e4m3 or e2m1."""
        return functional.linear(self.activation(x), weight)

    def window_row(self, rows: torch.Tensor) -> torch.Tensor:
        """Return window rows [..., D] as their cache gives them back."""
        return self._cached(self.formats.window, rows)

    def entry_row(self, rows: torch.Tensor) -> torch.Tensor:
        """Return entries [..., D] as their cache gives them back."""
        return self._cached(self.formats.entry, rows)

    def index_row(self, rows: torch.Tensor) -> torch.Tensor:
        """Return index keys or queries [..., index head dim] in the index format."""
        return self._cached(self.formats.index, rows)

    def _cached(self, row: RowFormat, rows: torch.Tensor) -> torch.Tensor:
        return row.unpack(row.pack(rows), rows.dtype) if self.caches else rows


def arithmetic_of(
    config: V41Config,
    *,
    activations: bool = True,
    caches: bool = True,
    quantized_output: bool = True,
    fixed_shapes: bool = False,
) -> Arithmetic:
    """Return the arithmetic that a configuration asks for; switches turn parts of it off."""
    return Arithmetic(
        formats=row_formats(config),
        activations=Q8(config.quant.activation_group) if activations else None,
        caches=caches,
        quantized_output=quantized_output,
        fixed_shapes=fixed_shapes,
    )


def table_rows(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [*rows.shape, width] of an e4m3 table with e8m0 scales per 32 values, reading only the rows asked for."""
    return _TABLE.decode(codes[rows], scales[rows]).to(dtype)
