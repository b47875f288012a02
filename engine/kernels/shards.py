"""Weights that lie in several pieces of memory, and the hash of a layer's n-grams.

A shard may lie on the device that reads, on another one that it can read, or in pinned host memory: kernels get
addresses, references the tensors. Knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class NgramColumns:
    """The hash of one layer; c columns, n-grams of up to n tokens, shorter ones first."""

    multipliers: torch.Tensor  # int64 [n], newest token first
    primes: torch.Tensor  # int64 [c]
    offsets: torch.Tensor  # int64 [c] first table row of each column
    pad: int
    """Compressed id that stands for tokens that do not exist."""


@dataclass(frozen=True, slots=True)
class Shards:
    """A table of e4m3 rows, or experts in tiles, cut along the first axis into shards of `each` (the last may have fewer)."""

    codes: tuple[torch.Tensor, ...]  # uint8 [rows, width], or int32 words of experts
    scales: tuple[torch.Tensor, ...]  # uint8 [rows, width / 32], or of experts
    addresses: torch.Tensor  # int64 [2, shards] of codes and scales, on the device that reads
    each: int

    @property
    def count(self) -> int:
        """Rows, or experts."""
        return sum(map(len, self.codes))


def shards_of(codes: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], device: torch.device) -> Shards:
    """Return shards that kernels on `device` can read; all but the last must be equally long."""
    each = len(codes[0])
    assert all(len(part) == each for part in codes[:-1])
    assert len(codes[-1]) <= each
    assert all(part.is_contiguous() for part in (*codes, *scales))
    # Kernels fetch codes by 16 bytes.
    assert all(part.data_ptr() % 16 == 0 for part in codes)
    addresses = torch.tensor([[part.data_ptr() for part in parts] for parts in (codes, scales)], device=device)
    return Shards(tuple(codes), tuple(scales), addresses, each)
