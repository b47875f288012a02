"""The gated feed-forward block: down(silu(gate(x)) * up(x))."""

import torch
from torch.nn import functional

from engine.layers.linear import ROW_TILE, Linear

_PIECE = 16_384
"""Elements per activation call in deterministic mode: below the size at which torch splits work over threads."""


class GatedMLP:
    """Two input projections, a gate, one output projection."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self._gate = gate
        self._up = up
        self._down = down

    def forward(self, x: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
        """Map [t, width] to [t, width]."""
        gate = self._gate.forward(x, deterministic=deterministic)
        up = self._up.forward(x, deterministic=deterministic)
        active = _invariant_silu(gate) if deterministic else functional.silu(gate, inplace=True)
        return self._down.forward(active.mul_(up), deterministic=deterministic)


def _invariant_silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU of [t, width] whose bits do not depend on t.

    torch computes the last elements of a range with scalar code that rounds differently, and where ranges end depends
    on size and threads. Row tiles padded to a multiple of ROW_TILE, in pieces of one fixed size, have no such rest.
    """
    num_rows, width = x.shape
    padded = functional.pad(x, (0, 0, 0, -num_rows % ROW_TILE)).reshape(-1)
    rest = -padded.numel() % _PIECE
    pieces = functional.pad(padded, (0, rest)).split(_PIECE)
    return torch.cat([functional.silu(piece) for piece in pieces])[: num_rows * width].view(num_rows, width)
