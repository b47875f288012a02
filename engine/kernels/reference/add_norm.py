"""Specification of `engine.kernels.add_norm`."""

import torch

from engine.layers.norm import RMSNorm


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add to the residual stream in place and normalise it; see the kernel for shapes."""
    if delta is not None:
        x.add_(delta)
    return RMSNorm(weight, eps).forward(x)
