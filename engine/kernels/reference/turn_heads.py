"""Specification of `engine.kernels.turn_heads`."""

import torch

from engine.kernels.reference.formats import turned


def turn_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the last pairs of every head in place; see the kernel for shapes."""
    x.copy_(turned(x, cos, sin))
