"""Specification of `engine.kernels.rms_quantize`."""

import torch

from engine.kernels.reference.formats import normalised, q8


def rms_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalised rows bfloat16 [t, d], and what a quantized linear reads of them: e4m3 codes, e8m0 scales."""
    made = normalised(x, weight, eps)
    return made, *q8(made)
