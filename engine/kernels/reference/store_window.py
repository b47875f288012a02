"""Specification of `engine.kernels.store_window`."""

import torch

from engine.kernels.reference.formats import normalised, q8, turned


def store_window(
    latents: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    record: torch.Tensor,
    at: torch.Tensor,
    rows: torch.Tensor,
    eps: float,
) -> None:
    """Normalise, rotate, quantize and store window rows; see the kernel for shapes."""
    codes, scales = q8(turned(normalised(latents, weight, eps), cos, sin))
    kept = record >= 0
    rows[record[kept], at[kept]] = torch.cat((codes, scales), 1)[kept]
