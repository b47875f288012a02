"""Root-mean-square normalisation as the model family defines it: statistics and product in one type, one cast.

Every function maps each row alone. Knows no layer.
"""

import torch


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return [..., 1]: 1 / sqrt(mean of squares over the last axis + eps)."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis of [..., width]; an all-zero row stays zero even with the family's eps of 1e-20."""
    return weight * (x * inverse_rms(x, eps))
