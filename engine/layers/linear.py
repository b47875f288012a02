"""Matrix products of a model: the linear layer, in a fast and in a batch-invariant form (decision A14).

Shape legend: t tokens. Weights are immutable and may be memory-mapped; nothing here copies or fuses them.
"""

import torch
from torch.nn import functional

ROW_TILE = 16
"""Rows per matrix product in deterministic mode: one fixed shape, so that a row's bits do not depend on the others."""


class Linear:
    """y = x W^T + b. `weight` [out, in] contiguous; `bias` [out] or None; both of one dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def forward(self, x: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
        """Map [t, in] contiguous to [t, out] of the same dtype; deterministic: in zero-padded tiles of ROW_TILE rows."""
        if not deterministic:
            return functional.linear(x, self._weight, self._bias)
        num_rows = x.shape[0]
        out = x.new_empty(num_rows, self._weight.shape[0])
        for start in range(0, num_rows, ROW_TILE):
            tile = x[start : start + ROW_TILE]
            count = tile.shape[0]
            # A fresh tile also fixes the memory alignment, which matrix kernels may look at.
            padded = x.new_zeros(ROW_TILE, x.shape[1])
            padded[:count] = tile
            out[start : start + count] = functional.linear(padded, self._weight, self._bias)[:count]
        return out
