"""Matrix products of a model: the linear layer, in a fast and in a batch-invariant form (decision A14).

Shape legend: t tokens. Weights are immutable and may be memory-mapped; nothing here copies or fuses them.
"""

import torch
from torch.nn import functional

ROW_TILE = 16
"""Rows per matrix product in deterministic mode: one fixed shape, so that a row's bits do not depend on the others."""
DEVICE_ROW_TILE = 128
"""The same on a GPU, where so many rows take as long as one: reading the weights."""


class Linear:
    """y = x W^T + b. `weight` [out, in] contiguous; `bias` [out] or None; both of one dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, row_tile: int = ROW_TILE) -> None:
        self._weight = weight
        self._bias = bias
        self._row_tile = row_tile

    def forward(self, x: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
        """Map [t, in] contiguous to [t, out] of the same dtype; deterministic: in zero-padded tiles of `row_tile` rows."""
        if not deterministic:
            return functional.linear(x, self._weight, self._bias)
        num_rows, size = x.shape[0], self._row_tile
        out = x.new_empty(num_rows, self._weight.shape[0])
        for start in range(0, num_rows, size):
            tile = x[start : start + size]
            count = tile.shape[0]
            # A fresh tile also fixes the memory alignment, which matrix kernels may look at.
            padded = x.new_zeros(size, x.shape[1])
            padded[:count] = tile
            out[start : start + count] = functional.linear(padded, self._weight, self._bias)[:count]
        return out
