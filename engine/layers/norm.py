"""Root-mean-square normalisation. Each token is normalised on its own, so results never depend on the batch."""

import torch


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, computed in at least float32. `weight` [width]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis of [t, width]; returns the dtype of `x`."""
        wide = x.float() if x.dtype is torch.bfloat16 else x
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return scaled.to(x.dtype) * self._weight
