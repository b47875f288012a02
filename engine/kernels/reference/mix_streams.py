"""Specification of `engine.kernels.mix_streams`."""

import torch

from engine.kernels.reference.formats import normalised, q8


def mix_streams(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    pairs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return new streams, the next sublayer's normalised input, its codes and scales; see the kernel for shapes."""
    num_streams = streams.shape[1]
    if pairs is not None:
        total = y.float()
        for k in range(len(pairs) // len(y)):
            total = total + pairs.unflatten(0, (len(y), -1))[:, k].float()
        y = total.bfloat16()
    mixed = post[:, :, None] * y.float()[:, None]
    for j in range(num_streams):
        mixed = mixed + comb[:, j, :, None] * streams.float()[:, j, None]
    made = mixed.bfloat16()
    collapsed = pre[:, 0, None] * made[:, 0].float()
    for k in range(1, num_streams):
        collapsed = collapsed + pre[:, k, None] * made[:, k].float()
    normed = normalised(collapsed.bfloat16(), weight, eps)
    return made, normed, *q8(normed)
