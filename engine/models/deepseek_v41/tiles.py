"""Runs functions of rows tile by tile: in fixed tiles, so that a row's bits depend on the row alone (decision A14).

A function of rows maps each row alone, but the kernels under it may round differently for other numbers of rows. With
fixed tiles every call has the same shapes; callers pad their rows to whole tiles.
"""

from collections.abc import Callable

import torch

FIXED_ROWS = 16
_FREE_ROWS = 512
"""Rows at a time where shapes are free: bounds the memory of gathered keys."""


class Tiles:
    """How rows are cut."""

    def __init__(self, *, fixed: bool) -> None:
        self.fixed = fixed
        """Every tile has FIXED_ROWS rows."""
        self.multiple = FIXED_ROWS if fixed else 1
        """Numbers of rows must be multiples of it."""
        self._rows = FIXED_ROWS if fixed else _FREE_ROWS

    def padded(self, num_rows: int) -> int:
        """Return the number of rows rounded up to whole tiles."""
        return -(-num_rows // self.multiple) * self.multiple

    def run(self, num_rows: int, function: Callable[[slice], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """Return the results [num_rows, ...] of a function that maps a slice of rows to tensors [rows, ...]."""
        assert num_rows % self.multiple == 0
        if num_rows <= self._rows:
            return function(slice(0, num_rows))
        parts = [function(slice(i, min(i + self._rows, num_rows))) for i in range(0, num_rows, self._rows)]
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
