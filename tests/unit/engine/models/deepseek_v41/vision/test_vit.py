import math

import numpy as np
import torch

from engine.models.deepseek_v41.vision.vit import Vit, apply, grid_angles, turn
from tests.fakes.vision import tiny_vision

torch.set_num_threads(1)


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def loud_vit(patches, rows, columns):
    """The published definition, patch by patch and head by head."""
    config, weights = tiny_vision()
    eps, heads = config.norm_eps, config.num_heads
    width = config.hidden_size // heads
    quarter = width // 4
    places = [(i // columns, i % columns) for i in range(rows * columns)]
    x = patches @ weights.patch.weight.numpy().T + weights.patch.bias.numpy()

    def rotated(vector, place):
        out = vector.copy()
        for pair in range(width // 2):
            axis, k = divmod(pair, quarter)
            angle = place[axis] * 10000.0 ** (-k / quarter)
            a, b = vector[pair], vector[pair + width // 2]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + width // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    for block in weights.blocks:
        qkv = norm(x, block.norm1.numpy(), eps) @ block.wqkv.weight.numpy().T + block.wqkv.bias.numpy()
        out = np.zeros_like(x)
        for head in range(heads):
            part = [qkv[:, i * x.shape[1] + head * width :][:, :width] for i in range(3)]
            q = [rotated(v, place) for v, place in zip(part[0], places, strict=True)]
            k = [rotated(v, place) for v, place in zip(part[1], places, strict=True)]
            for i in range(len(x)):
                scores = np.array([q[i] @ other for other in k]) / math.sqrt(width)
                odds = np.exp(scores - scores.max())
                out[i, head * width : (head + 1) * width] = odds @ part[2] / odds.sum()
        x = x + out @ block.wo.weight.numpy().T + block.wo.bias.numpy()
        inner = norm(x, block.norm2.numpy(), eps) @ block.w1.numpy().T
        gate, up = inner[:, : config.inner_size], inner[:, config.inner_size :]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block.w2.numpy().T
    return norm(x, weights.norm.numpy(), eps)


def test_the_encoder_is_the_published_definition():
    config, weights = tiny_vision()
    patches = np.random.default_rng(1).uniform(-1, 1, (3 * 4, 3 * config.patch_size**2))
    got = Vit(weights, config).forward(torch.from_numpy(patches), 3, 4)
    assert np.abs(got.numpy() - loud_vit(patches, 3, 4)).max() < 1e-9


def test_attention_depends_on_distances_between_patches_only():
    generator = torch.Generator().manual_seed(1)
    one, other = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=generator)
    angles = grid_angles(9, 7, 16, 10000.0)

    def score(first, second):
        turned = [
            turn(x, angles[row * 7 + column].cos(), angles[row * 7 + column].sin())
            for x, (row, column) in ((one, first), (other, second))
        ]
        return float((turned[0] * turned[1]).sum())

    assert abs(score((1, 2), (4, 3)) - score((5, 4), (8, 5))) < 1e-12
    assert abs(score((1, 2), (4, 3)) - score((1, 2), (3, 4))) > 1e-3


def test_a_patch_elsewhere_gives_something_else():
    config, weights = tiny_vision()
    patches = torch.rand(4, 3 * config.patch_size**2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    vit = Vit(weights, config)
    square, line = vit.forward(patches, 2, 2), vit.forward(patches, 1, 4)
    assert (square - line).abs().max() > 1e-3
    assert apply(weights.patch, patches).shape == square.shape
