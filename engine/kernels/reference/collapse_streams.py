"""Specification of `engine.kernels.collapse_streams`."""

import torch

from engine.kernels.reference.formats import normalised, q8


def collapse_streams(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalised sum of streams, its codes and scales; see the kernel for shapes."""
    collapsed = pre[:, 0, None] * streams[:, 0].float()
    for k in range(1, streams.shape[1]):
        collapsed = collapsed + pre[:, k, None] * streams[:, k].float()
    normed = normalised(collapsed.bfloat16(), weight, eps)
    return normed, *q8(normed)
