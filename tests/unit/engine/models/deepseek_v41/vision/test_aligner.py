import math

import numpy as np
import torch

from engine.models.deepseek_v41.vision.aligner import Aligner
from tests.fakes.vision import tiny_vision

torch.set_num_threads(1)


def cell_by_hand(grid, row, column, weights, side=3):
    """One cell of a grid [rows, columns, w]: channel first, then the patch's row and column; zeros beyond the edge."""
    values = [
        grid[3 * row + y, 3 * column + x, channel]
        if 3 * row + y < grid.shape[0] and 3 * column + x < grid.shape[1]
        else 0.0
        for channel in range(grid.shape[2])
        for y in range(side)
        for x in range(side)
    ]
    inner = weights.aligner1.weight.numpy() @ np.array(values) + weights.aligner1.bias.numpy()
    inner = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in inner])
    return weights.aligner2.weight.numpy() @ inner + weights.aligner2.bias.numpy()


def test_cells_are_unfolded_channel_first_and_filled_with_zeros_over_the_edge():
    config, weights = tiny_vision()
    rows, columns = 4, 7
    grid = np.random.default_rng(3).standard_normal((rows, columns, config.hidden_size))
    patches = torch.from_numpy(grid.reshape(rows * columns, -1))
    got = Aligner(weights, config.downsample_ratio).forward(patches, rows, columns).numpy()
    expected = np.array([cell_by_hand(grid, row, column, weights) for row in range(2) for column in range(3)])
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < 1e-10
