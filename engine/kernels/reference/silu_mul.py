"""Specification of `engine.kernels.silu_mul`."""

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half; see the kernel for shapes."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
