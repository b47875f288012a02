"""Specification of `engine.kernels.choose_routes`."""

import torch
from torch.nn import functional


def choose_routes(
    logits: torch.Tensor, bias: torch.Tensor, kinds: torch.Tensor, k: int, temperature: float, eps: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts, ascending, and their weights; see the kernel for the rules."""
    scores = functional.softplus(logits / temperature, threshold=60).sqrt()
    steered = scores + bias[kinds.clamp(min=0).long()]
    chosen = steered.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
    weights = scores.gather(1, chosen)
    if k > 1:
        weights = weights / (weights.sum(1, keepdim=True) + eps)
    return chosen.int().masked_fill(kinds[:, None] < 0, -1), weights * scale
