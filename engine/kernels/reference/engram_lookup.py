"""Specification of `engine.kernels.engram_lookup`."""

from collections.abc import Sequence

import torch

from engine.kernels.shards import NgramColumns, Shards


def engram_lookup(
    ngrams: torch.Tensor, token_map: torch.Tensor, columns: NgramColumns, table: Shards
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table rows of every token's n-grams; see the kernel for shapes."""
    alive = (ngrams >= 0).cumprod(1).bool()
    products = torch.where(alive, token_map[ngrams.clamp(min=0)], columns.pad) * columns.multipliers
    mixed, found = products[:, :1], list[torch.Tensor]()
    each = len(columns.primes) // (ngrams.shape[1] - 1)
    for i in range(1, ngrams.shape[1]):
        mixed = mixed ^ products[:, i : i + 1]
        part = slice((i - 1) * each, i * each)
        found.append(mixed % columns.primes[part] + columns.offsets[part])
    rows = torch.cat(found, 1)
    return _rows(table.codes, rows, table.each), _rows(table.scales, rows, table.each)


def _rows(shards: Sequence[torch.Tensor], rows: torch.Tensor, rows_each: int) -> torch.Tensor:
    """Return [t, c * width] of int64 rows [t, c] over all shards."""
    made = torch.zeros(*rows.shape, shards[0].shape[1], dtype=torch.uint8, device=rows.device)
    for n, shard in enumerate(shards):
        inside = (rows - n * rows_each).clamp(0, len(shard) - 1).to(shard.device)
        made = torch.where((rows // rows_each == n)[:, :, None], shard[inside].to(rows.device), made)
    return made.flatten(1)
