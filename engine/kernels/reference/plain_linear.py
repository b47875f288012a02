"""Specification of `engine.kernels.plain_linear`."""

import torch


def plain_linear(x: torch.Tensor, weight: torch.Tensor, *, fixed: bool = False) -> torch.Tensor:
    """Return float32 x W^T of bfloat16 rows and weights; see the kernel for shapes."""
    assert isinstance(fixed, bool)
    return x.float() @ weight.float().T
