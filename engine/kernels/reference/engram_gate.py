"""Specification of `engine.kernels.engram_gate`."""

import torch

_LEAST = 1e-6


def engram_gate(
    streams: torch.Tensor, projected: torch.Tensor, weight: torch.Tensor, skip: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the streams with the gated value added; see the kernel for shapes."""
    hc, width = streams.shape[1:]
    x = streams.float()
    keys, value = projected.float().split((hc * width, width), 1)
    keys = keys.unflatten(1, (hc, width))
    affinity = (x * weight * keys).sum(2) * width**-0.5
    affinity = affinity * torch.rsqrt(x.square().mean(2) + eps) * torch.rsqrt(keys.square().mean(2) + eps)
    gate = torch.sigmoid(affinity.abs().clamp(min=_LEAST).sqrt().copysign(affinity))
    added = gate[:, :, None] * value[:, None]
    return (x + added.masked_fill(skip[:, None, None], 0.0)).bfloat16()
