"""Residual streams: how t rows of hc streams are collapsed into a sublayer's input and its output spread over them.

V4.1 collapses with the coefficients of the sublayer before (single pass), V4 with those of the same one; which is
meant, the block decides. Every function maps each row alone. Knows no attention and no experts.

Shape legend: t rows, hc streams, d hidden.
"""

import functools
from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.config import MhcConfig
from engine.models.deepseek_v41.norm import inverse_rms
from engine.models.deepseek_v41.weights import HeadMixWeights, MixWeights


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What one sublayer mixes its streams with."""

    pre: torch.Tensor  # [t, hc] weights of a collapse
    post: torch.Tensor  # [t, hc] weights of the sublayer's output
    comb: torch.Tensor  # [t, hc, hc] from stream (first) to stream (second), nearly doubly stochastic

    def take(self, rows: torch.Tensor | slice) -> "Coefficients":
        """Return the coefficients of some rows."""
        return Coefficients(self.pre[rows], self.post[rows], self.comb[rows])


class StreamMixer:
    """Computes the coefficients of one sublayer from the streams that enter it."""

    def __init__(self, weights: MixWeights, config: MhcConfig, norm_eps: float, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._config = config
        self._norm_eps = norm_eps
        self._arithmetic = arithmetic
        hc = config.mult
        self._scale = weights.scale.repeat_interleave(torch.tensor([hc, hc, hc * hc], device=weights.scale.device))

    def forward(self, streams: torch.Tensor) -> Coefficients:
        """Map [t, hc, d]; one root-mean-square statistic over all streams of a row."""
        hc, eps = self._config.mult, self._config.eps
        flat = streams.flatten(1)
        z = self._arithmetic.linear(flat, self._weights.fn) * inverse_rms(flat, self._norm_eps)
        z = z * self._scale + self._weights.base
        pre, post = torch.sigmoid(z[:, : 2 * hc]).chunk(2, 1)
        comb = doubly_stochastic(z[:, 2 * hc :].view(-1, hc, hc), self._config.sinkhorn_iters, eps)
        return Coefficients(pre + eps, 2 * post, comb)


def doubly_stochastic(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Return [t, hc, hc] with rows and columns summing to about one (Sinkhorn; the first round has no row step)."""
    hc = logits.shape[-1]
    rows, columns = _sums(hc, logits.dtype)
    # As a matrix [t, hc hc]: one product gives every element the sum of its row or column, which is what time goes to.
    comb = logits.softmax(-1).add_(eps).flatten(1)
    least = comb.new_full((1,), eps)
    comb.div_(torch.addmm(least, comb, columns))
    for _ in range(iterations - 1):
        comb.div_(torch.addmm(least, comb, rows))
        comb.div_(torch.addmm(least, comb, columns))
    return comb.unflatten(1, (hc, hc))


@functools.cache
def _sums(hc: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two constant matrices [hc hc, hc hc]: sums over the second index of an element, and over the first."""
    number = torch.arange(hc * hc)
    same_row = number[:, None].div(hc, rounding_mode="floor") == number.div(hc, rounding_mode="floor")
    return same_row.to(dtype), (number[:, None] % hc == number % hc).to(dtype)


class HeadMixer:
    """V4's collapse before the final norm, with weights of its own."""

    def __init__(self, weights: HeadMixWeights, config: MhcConfig, norm_eps: float, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._eps = config.eps
        self._norm_eps = norm_eps
        self._arithmetic = arithmetic

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the collapse weights [t, hc] of streams [t, hc, d]."""
        flat = streams.flatten(1)
        z = self._arithmetic.linear(flat, self._weights.fn) * inverse_rms(flat, self._norm_eps)
        return torch.sigmoid(z * self._weights.scale + self._weights.base) + self._eps


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Return [t, d]: the streams [t, hc, d] weighted by `pre` [t, hc]."""
    return (pre[:, :, None] * streams).sum(1)


def expand(y: torch.Tensor, streams: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """Return the new streams [t, hc, d]: output y [t, d] to every stream, plus the old ones over comb's first index."""
    # Written as a sum of hc products: a batched matrix product would round differently for other numbers of rows.
    mixed = coefficients.post[:, :, None] * y[:, None, :]
    for j in range(streams.shape[1]):
        mixed += coefficients.comb[:, j, :, None] * streams[:, j, None, :]
    return mixed


def first_stream(num_rows: int, hc: int, like: torch.Tensor) -> torch.Tensor:
    """Return the collapse weights [t, hc] that enter the first layer: stream 0 alone."""
    pre = like.new_zeros(num_rows, hc)
    pre[:, 0] = 1
    return pre
