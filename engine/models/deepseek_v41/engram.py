"""The n-gram memory of one layer: looks rows up, gates them by the streams and adds them. Image rows pass unchanged.

The table is large and may be memory-mapped: only looked-up rows are read. Knows no token ids; see `engram_hash`.

Shape legend: t rows, hc streams, d hidden, c columns (table rows per token).
"""

import torch

from engine.models.deepseek_v41.arithmetic import Arithmetic, table_rows
from engine.models.deepseek_v41.norm import inverse_rms
from engine.models.deepseek_v41.weights import EngramWeights

_LEAST = 1e-6
"""Bound on |a| under the root of the gate."""


class Engram:
    """Applied to the streams before the layer, and before its mixing coefficients are computed."""

    def __init__(self, weights: EngramWeights, norm_eps: float, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._eps = norm_eps
        self._arithmetic = arithmetic

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [t, c * head_dim] for table rows int64 [t, c], in the type of the weights."""
        weights = self._weights
        return table_rows(weights.codes, weights.scales, rows, weights.wkv.dtype).flatten(1)

    def forward(self, streams: torch.Tensor, found: torch.Tensor, is_image: torch.Tensor | None) -> torch.Tensor:
        """Return the new streams [t, hc, d]; `found` is what `look_up` gave, `is_image` bool [t]."""
        weights, eps = self._weights, self._eps
        hc, hidden = streams.shape[1:]
        # The rows come from the table in the very format that a quantized linear would give them.
        projected = self._arithmetic.linear(found, weights.wkv)
        keys, value = projected[:, : hc * hidden].view(-1, hc, hidden), projected[:, hc * hidden :]
        affinity = (streams * (weights.q_weight * weights.k_weight) * keys).sum(2, keepdim=True)
        affinity = affinity * inverse_rms(streams, eps) * inverse_rms(keys, eps) * hidden**-0.5
        gate = torch.sigmoid(affinity.abs().clamp(min=_LEAST).sqrt().copysign(affinity))
        added = gate * value[:, None]
        if is_image is not None:
            added = added.masked_fill(is_image[:, None, None], 0.0)
        return streams + added
