"""From patches to rows of the text model: each square of patches (a cell) becomes one row.

Shape legend: w width of the encoder, d hidden of the text model, r patches per side of a cell.
"""

import torch
from torch.nn import functional

from engine.models.deepseek_v41.vision.vit import apply
from engine.models.deepseek_v41.vision.weights import VisionWeights


class Aligner:
    """Unfolds the grid and maps it."""

    def __init__(self, weights: VisionWeights, downsample: int) -> None:
        self._weights = weights
        self._side = downsample

    def forward(self, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Map [rows * columns, w] to [cells, d], both in reading order; cells over the edge are filled with zeros."""
        side = self._side
        grid = patches.T.reshape(1, -1, rows, columns)
        grid = functional.pad(grid, (0, -columns % side, 0, -rows % side))
        cells = functional.unfold(grid, kernel_size=side, stride=side)[0].T
        return apply(self._weights.aligner2, functional.gelu(apply(self._weights.aligner1, cells)))
