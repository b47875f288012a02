"""Specification of `engine.kernels.quantize_rows`."""

import torch

from engine.kernels.reference.formats import q8


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes and e8m0 scales of bfloat16 rows; see the kernel for shapes."""
    return q8(x)
