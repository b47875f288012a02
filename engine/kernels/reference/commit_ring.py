"""Specification of `engine.kernels.commit_ring`."""

import torch


def commit_ring(
    packed: torch.Tensor, tokens: torch.Tensor, record: torch.Tensor, positions: torch.Tensor, ring: torch.Tensor
) -> None:
    """Copy some rows of a chunk into the ring; see the kernel for shapes."""
    kept = record >= 0
    ring[record[kept], positions[kept] % ring.shape[1]] = packed[tokens[kept]]
