"""Specification of `engine.kernels.dense_linear`."""

import torch

from engine.kernels.reference.formats import decode_q8, e4m3_value, power


def dense_linear(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, *, fixed: bool = False
) -> torch.Tensor:
    """Multiply quantized rows by weights of e4m3 blocks, group by group; see the kernel for shapes."""
    groups, out, inner = weight.shape
    rows = decode_q8(codes, scales).unflatten(1, (groups, inner))
    spread = power(weight_scales).repeat_interleave(32, 1)[:, :out].repeat_interleave(32, 2)[:, :, :inner]
    assert isinstance(fixed, bool)
    return torch.bmm(rows.transpose(0, 1), (e4m3_value(weight) * spread).mT).transpose(0, 1).flatten(1).bfloat16()
