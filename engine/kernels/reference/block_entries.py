"""Specification of `engine.kernels.block_entries`."""

import torch


def block_entries(columns: torch.Tensor, blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Return the entries of columns of candidate blocks; see the kernel for the rules."""
    at = columns.clamp(min=0)
    entries = blocks.gather(1, (at // size).long()) * size + at % size
    return entries.masked_fill(columns < 0, -1)
