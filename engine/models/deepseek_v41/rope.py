"""Rotary embedding of the family: neighbouring pairs, in the last dimensions of a head, with a long base beside.

Everything in a layer with compressed entries (queries, window keys, entries, index queries and keys) turns with the
long, YaRN-stretched base; layers with a window only, and draft stages, with the plain one. Tables are float32 as the
vendor's engine has them (float64 for float64 models). Knows no layer's weights.
"""

from dataclasses import dataclass

import torch

from engine.layers.rotary import RopeScaling, Rotary
from engine.models.deepseek_v41.config import V41Config


@dataclass(frozen=True, slots=True)
class Turn:
    """Cosine and sine of t rows, float [t, rope_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def take(self, rows: torch.Tensor | slice) -> "Turn":
        """Return the turns of some rows."""
        return Turn(self.cos[rows], self.sin[rows])


_FIRST_POSITIONS = 8192


def rope_bases(config: V41Config) -> dict[str, tuple[float, RopeScaling]]:
    """Return base and scaling by a layer plan's `rope`: entries are compressed from far, windows are near."""
    scaling = RopeScaling()
    if config.rope_scaling is not None:
        yarn = config.rope_scaling
        scaling = RopeScaling(
            kind="yarn",
            factor=yarn.factor,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
            original_max_positions=yarn.original_max_positions,
            attention_factor=1.0,
        )
    return {"window": (config.rope_theta, RopeScaling()), "compress": (config.compress_rope_theta, scaling)}


class RopeTables:
    """Both tables of a model, for positions 0..num_positions - 1.

    A table grows when a position behind its end is asked for: a million positions would take half a gigabyte, and few
    deployments see them. Used by one thread.
    """

    def __init__(self, config: V41Config, num_positions: int, dtype: torch.dtype) -> None:
        self._dim, self._dtype, self._most = config.rope_dim, dtype, num_positions
        self._bases = rope_bases(config)
        self._sizes = dict.fromkeys(self._bases, min(num_positions, _FIRST_POSITIONS))
        self._tables = {kind: self._table(kind) for kind in self._bases}

    def at(self, kind: str, positions: torch.Tensor) -> Turn:
        """Return the turns of int64 positions [t]; `kind` is a layer plan's `rope`."""
        last = int(positions.max()) if len(positions) else 0
        if self._sizes[kind] <= last < self._most:
            while self._sizes[kind] <= last:
                self._sizes[kind] = min(2 * self._sizes[kind], self._most)
            self._tables[kind] = self._table(kind)
        cos, sin = self._tables[kind].at(positions)
        return Turn(cos[:, 0], sin[:, 0])

    def _table(self, kind: str) -> Rotary:
        theta, scaling = self._bases[kind]
        return Rotary(self._dim, self._sizes[kind], theta, scaling, self._dtype)


def rotate(x: torch.Tensor, turn: Turn, *, inverse: bool = False) -> torch.Tensor:
    """Rotate the last rope_dim values of [t, width] or [t, heads, width]; `inverse` turns back."""
    cos, sin = (turn.cos, turn.sin) if x.dim() == 2 else (turn.cos[:, None], turn.sin[:, None])
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].unflatten(-1, (-1, 2))
    real, imaginary = pairs.unbind(-1)
    if inverse:
        sin = -sin
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned), -1)
