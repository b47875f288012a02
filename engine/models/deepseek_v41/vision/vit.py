"""The transformer over the patches of one image: every patch sees every other, places turn queries and keys.

Half of the rotary frequencies turn with a patch's row, half with its column; a value is paired with the one half a head
further on. Knows no pixels and no text model.

Shape legend: n patches, w width, H heads, D head dim, g rotary frequencies per axis (D / 4).
"""

import torch
from torch.nn import functional

from engine.models.deepseek_v41.config import VisionConfig
from engine.models.deepseek_v41.norm import rms
from engine.models.deepseek_v41.vision.weights import Linear, VisionWeights, VitBlockWeights


def apply(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return x [..., in] mapped to [..., out]."""
    return functional.linear(x, linear.weight, linear.bias)


def grid_angles(rows: int, columns: int, head_dim: int, theta: float) -> torch.Tensor:
    """Return float64 [rows * columns, D / 2]: the angles of patches in reading order, rows' then columns'."""
    freqs = theta ** (-torch.arange(0, head_dim // 2, 2, dtype=torch.float64) / (head_dim // 2))
    row = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float64).repeat(rows)
    return torch.cat((row[:, None] * freqs, column[:, None] * freqs), 1)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [n, H, D] by angles whose cosine and sine are [n, 1, D / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Vit:
    """All layers and the norm behind them."""

    def __init__(self, weights: VisionWeights, config: VisionConfig) -> None:
        self._weights = weights
        self._config = config

    def forward(self, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Map the pixels [n, 3 p p] of a grid of patches in reading order to [n, w]."""
        config = self._config
        x = apply(self._weights.patch, patches)
        angles = grid_angles(rows, columns, config.hidden_size // config.num_heads, config.rope_theta)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self._weights.blocks:
            x = x + self._attend(block, rms(x, block.norm1, config.norm_eps), cos, sin)
            x = x + _feed_forward(block, rms(x, block.norm2, config.norm_eps))
        return rms(x, self._weights.norm, config.norm_eps)

    def _attend(self, block: VitBlockWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        queries, keys, values = apply(block.wqkv, x).unflatten(1, (3, self._config.num_heads, -1)).unbind(1)
        queries, keys = turn(queries, cos, sin), turn(keys, cos, sin)
        heads = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        )
        return apply(block.wo, heads[0].transpose(0, 1).flatten(1))


def _feed_forward(block: VitBlockWeights, x: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x, block.w1).chunk(2, -1)
    return functional.linear(functional.silu(gate) * up, block.w2)
