"""Rotary turns of positions, computed where they are needed: a table for a million positions would take half a gigabyte.

Angles are float32 products of position and frequency, as in `rope`. Knows no layer.
"""

from dataclasses import dataclass

import torch

from engine.layers.rotary import inverse_frequencies
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.ops import Ops
from engine.models.deepseek_v41.rope import rope_bases


@dataclass(frozen=True, slots=True)
class Turn:
    """Cosine and sine of t rows, float32 [t, rope_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


class Turns:
    """Both bases of a model."""

    def __init__(self, config: V41Config, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` of angles: float64 only to compare."""
        self._frequencies = {
            kind: inverse_frequencies(config.rope_dim, theta, how, dtype).to(device)
            for kind, (theta, how) in rope_bases(config).items()
        }

    def at(self, kind: str, positions: torch.Tensor, ops: Ops, back: int = 0) -> Turn:
        """Return the turns of what is `back` before int64 positions [t], 0 at least; `kind` is a layer plan's `rope`."""
        return Turn(*ops.rotary_turns(positions, self._frequencies[kind], back))
