"""Compression of m neighbouring tokens into one global entry, and the keys by which entries are selected.

Entry j stands for tokens [j m, (j + 1) m) and carries the position of the first of them. It can be made as soon as the
group's last token has run, from the pending rows (values and gate scores) of its group; V4's m = 4 also reads the
group before. Knows no cache: pending rows come as tensors.

Shape legend: t rows, n entries, m tokens per group, c = 2 with overlap else 1, w entry width (D, or index head dim).
"""

import torch

from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.layer_map import LayerPlan
from engine.models.deepseek_v41.norm import rms
from engine.models.deepseek_v41.rope import Turn, rotate
from engine.models.deepseek_v41.weights import CompressorWeights, IndexKeyWeights


class Compressor:
    """Pools the tokens of one layer."""

    def __init__(self, weights: CompressorWeights, plan: LayerPlan, config: V41Config, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self.group = plan.m
        """m: tokens per entry."""
        self._eps = config.norm_eps
        self._arithmetic = arithmetic
        self.tokens_read = plan.m * (2 if plan.overlap else 1)
        """Tokens whose pending rows make one entry: the last of them is the last token of the group."""
        self.pending_width = 0 if weights.wgate is None else weights.wkv.shape[0]
        """Values per half of a pending row; 0 if m = 1, which keeps none."""

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the pending rows [t, 2, c w] of inputs x [t, d]: values, then gate scores (m > 1)."""
        weights = self._weights
        values = self._arithmetic.linear(x, weights.wkv)
        if weights.wgate is None:
            return values[:, None]
        gates = self._arithmetic.linear(x, weights.wgate)
        if weights.ape is not None:
            gates = gates + weights.ape[positions % self.group]
        return torch.stack((values, gates), 1)

    def pool(self, pending: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
        """Return the normalised latents [n, w] of entries, not rotated.

        `pending` [n, tokens_read, 2, c w] in token order ([n, 1, 1, w] if m = 1); `exists` bool [n, tokens_read] is
        false for tokens before the sequence, whose rows may hold anything.
        """
        if self._weights.wgate is None:
            return rms(pending[:, 0, 0], self._weights.norm, self._eps)
        values, gates = pending.unbind(2)
        if self.tokens_read > self.group:
            width = values.shape[-1] // 2
            # The group before gives its first half, the own group its second.
            values = torch.cat((values[:, : self.group, :width], values[:, self.group :, width:]), 1)
            gates = torch.cat((gates[:, : self.group, :width], gates[:, self.group :, width:]), 1)
        values = values.masked_fill(~exists[:, :, None], 0.0)
        gates = gates.masked_fill(~exists[:, :, None], -torch.inf)
        return rms((gates.softmax(1) * values).sum(1), self._weights.norm, self._eps)


class IndexKey:
    """V4.1's index key: projected from an entry's latent before that is rotated."""

    def __init__(self, weights: IndexKeyWeights, config: V41Config, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._eps = config.norm_eps
        self._arithmetic = arithmetic

    def forward(self, latents: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Map latents [n, D] to keys [n, index head dim], rotated, before any cache format."""
        return rotate(rms(self._arithmetic.linear(latents, self._weights.wk), self._weights.norm, self._eps), turn)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last axis (a power of two) by the normalised Hadamard matrix, in Sylvester's order."""
    width = x.shape[-1]
    assert width & (width - 1) == 0, width
    step = 1
    while step < width:
        pairs = x.unflatten(-1, (-1, 2, step))
        x = torch.cat((pairs[..., :1, :] + pairs[..., 1:, :], pairs[..., :1, :] - pairs[..., 1:, :]), -2).flatten(-3)
        step *= 2
    return x * width**-0.5
