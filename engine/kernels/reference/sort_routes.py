"""Specification of `engine.kernels.sort_routes`."""

import torch


def sort_routes(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs sorted by expert, and where each expert's begin; see the kernel for shapes."""
    flat = experts.flatten()
    kept = (flat >= 0).nonzero().flatten()
    order = torch.full_like(flat, -1)
    order[: len(kept)] = kept[flat[kept].sort(stable=True).indices].int()
    counts = torch.bincount(flat[kept].long(), minlength=num_experts)
    return order, torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
