"""Attention of one layer apart from where its keys lie: projections, the core with sinks, grouped output projection.

One latent per token is key and value at once and shared by all heads; values carry rotated dimensions, which the
output turns back by the query's own position. Knows no cache: keys come as tensors.

Shape legend: t rows, H heads, D head dim, G output groups, n keys.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.norm import inverse_rms, rms
from engine.models.deepseek_v41.rope import Turn, rotate
from engine.models.deepseek_v41.weights import AttentionWeights


@dataclass(frozen=True, slots=True)
class Queries:
    """What rows ask with."""

    latent: torch.Tensor  # [t, q_lora] normalised; the index query is made of it too
    heads: torch.Tensor  # [t, H, D] rotated


class Projections:
    """Input side of an attention sublayer; x is its collapsed, normalised input [t, d]."""

    def __init__(self, weights: AttentionWeights, config: V41Config, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._heads = config.num_heads
        self._eps = config.norm_eps
        self._head_norm = config.q_head_norm
        self._arithmetic = arithmetic

    def queries(self, x: torch.Tensor, turn: Turn) -> Queries:
        """Return the queries of rows x."""
        weights, linear = self._weights, self._arithmetic.quantized_linear
        latent = rms(linear(x, weights.wq_a), weights.q_norm, self._eps)
        heads = linear(latent, weights.wq_b).unflatten(1, (self._heads, -1))
        if self._head_norm:
            heads = heads * inverse_rms(heads, self._eps)
        return Queries(latent, rotate(heads, turn))

    def window_rows(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Return the window KV [t, D] of rows x, rotated, before any cache format.

        A draft stage calls this with its context rows in place of x.
        """
        latent = rms(self._arithmetic.quantized_linear(x, self._weights.wkv), self._weights.kv_norm, self._eps)
        return rotate(latent, turn)


def attend(queries: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Return [t, H, D]: one softmax over all valid keys of a row, with a sink per head in the denominator only.

    `queries` [t, H, D]; `keys` [n, D] shared by all rows or [t, n, D]; `valid` bool [t, n]. Keys that are not valid may
    hold anything if they are given per row. A row without valid keys yields zeros.
    """
    scale = queries.shape[-1] ** -0.5
    if keys.dim() == 3:
        keys = keys.masked_fill(~valid[:, :, None], 0.0)
    scores = (queries @ keys.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~valid[:, None, :], -torch.inf)
    # The sink bounds the maximum from below, so that a row without keys stays finite.
    top = scores.amax(-1, keepdim=True).maximum(sink[:, None]) if scores.shape[-1] else sink[:, None]
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink[:, None] - top).exp()
    return (weights / total) @ keys


class OutputProjection:
    """Output side: turns back, projects block-diagonally per group of heads, then to hidden width."""

    def __init__(self, weights: AttentionWeights, config: V41Config, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._groups = config.o_groups
        self._arithmetic = arithmetic

    def forward(self, attended: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Map [t, H, D] to [t, d]; `turn` is the queries' own."""
        straight = rotate(attended, turn, inverse=True).flatten(1)
        if self._arithmetic.quantized_output:
            straight = self._arithmetic.activation(straight)
        grouped = straight.unflatten(1, (self._groups, -1))
        parts = [
            self._arithmetic.linear(grouped[:, g].contiguous(), self._weights.wo_a[g]) for g in range(self._groups)
        ]
        return self._arithmetic.quantized_linear(torch.cat(parts, 1), self._weights.wo_b)
