"""Specification of `engine.kernels.swiglu_quantize`."""

import torch
from torch.nn import functional

from engine.kernels.reference.formats import q8


def swiglu_quantize(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inner activation of a gated block, quantized; see the kernel for shapes."""
    gate, up = x.float().chunk(2, 1)
    return q8((functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).bfloat16())
