"""Specification of `engine.kernels.rotary_turns`."""

import torch


def rotary_turns(positions: torch.Tensor, frequencies: torch.Tensor, back: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of positions, in the type of the frequencies; see the kernel for shapes."""
    angles = (positions - back).clamp(min=0).float()[:, None] * frequencies
    return angles.cos(), angles.sin()
