"""Selection of global entries: index queries, scores, the best k of them, and candidate blocks for later layers.

Declared rule: scores are compared as they are (after one rounding to `score_dtype` if set); ties go to the lowest entry
(or block) number; only entries that are visible and whose score is finite can be selected; a selection is published in
ascending order and padded with -1. Knows no cache: keys come as tensors.

Shape legend: t rows, h index heads, w index head dim, n entries, k selected.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.compressor import hadamard
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.rope import Turn, rotate
from engine.models.deepseek_v41.weights import IndexerWeights


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What rows are scored with."""

    heads: torch.Tensor  # [t, h, w] rotated, in the index format if caches are quantized
    weights: torch.Tensor  # [t, h] may be negative

    def take(self, rows: torch.Tensor | slice) -> "IndexQueries":
        """Return the queries of some rows."""
        return IndexQueries(self.heads[rows], self.weights[rows])


class Indexer:
    """Index queries of a layer that selects entries itself."""

    def __init__(self, weights: IndexerWeights, config: V41Config, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._heads = config.index.num_heads
        self._hadamard = config.index.hadamard
        self._scale = config.index.head_dim**-0.5 * config.index.num_heads**-0.5
        self._arithmetic = arithmetic

    def queries(self, x: torch.Tensor, latent: torch.Tensor, turn: Turn) -> IndexQueries:
        """Return the index queries of inputs x [t, d] with query latents [t, q_lora]."""
        heads = self._arithmetic.quantized_linear(latent, self._weights.wq_b).unflatten(1, (self._heads, -1))
        heads = rotate(heads, turn)
        if self._hadamard:
            heads = hadamard(heads)
        weights = self._arithmetic.linear(x, self._weights.weights_proj) * self._scale
        return IndexQueries(self._arithmetic.index_row(heads), weights)


def index_scores(queries: IndexQueries, keys: torch.Tensor, score_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return [t, n]: weighted sums of rectified products. `keys` [n, w] for all rows or [t, n, w]."""
    products = (queries.heads @ keys.transpose(-1, -2)).relu_()
    scores = (queries.weights[:, None, :] @ products)[:, 0]
    return scores if score_dtype is None else scores.to(score_dtype).to(scores.dtype)


def select_top(scores: torch.Tensor, allowed: torch.Tensor, k: int) -> torch.Tensor:
    """Return int64 [t, min(k, n)]: the columns of the best allowed scores, ascending, -1 behind the last.

    `scores` [t, n]; `allowed` bool [t, n], columns in entry order.
    """
    columns = scores.shape[1]
    scores = scores.masked_fill(~allowed, -torch.inf)
    if columns <= k:
        best = torch.arange(columns, device=scores.device).expand(scores.shape[0], columns)
    else:
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    usable = scores.gather(1, best).isfinite()
    ordered = best.masked_fill(~usable, columns).sort(dim=1).values
    return ordered.masked_fill(ordered == columns, -1)


def candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, block_size: int, top_blocks: int) -> torch.Tensor:
    """Return int64 [t, min(top_blocks, blocks)]: blocks of entries that later layers may select in, ascending, -1 padded.

    `scores` [t, n] of entries 0..n-1, `visible` int64 [t] how many of them a row sees. A block counts as its best
    score; the one that holds the newest visible entry always belongs.
    """
    num_rows, columns = scores.shape
    blocks = -(-columns // block_size)
    seen = torch.arange(columns, device=scores.device) < visible[:, None]
    padded = scores.new_full((num_rows, blocks * block_size), -torch.inf)
    padded[:, :columns] = scores.masked_fill(~seen, -torch.inf)
    best = padded.unflatten(1, (blocks, block_size)).amax(2)
    number = torch.arange(blocks, device=scores.device)
    pinned = (number == (visible[:, None] - 1).div(block_size, rounding_mode="floor")) & (visible[:, None] > 0)
    allowed = best.isfinite() | pinned
    # Only the order counts from here on: the pinned block gets a finite value above all others.
    top = best.masked_fill(~best.isfinite(), 0.0).abs().amax(1, keepdim=True) + 1 if blocks else best
    return select_top(torch.where(pinned, top, best), allowed, top_blocks)


def entries_of_blocks(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return int64 [t, blocks * block_size]: the entries of blocks [t, blocks], in order; -1 for those of block -1."""
    entries = blocks[:, :, None] * block_size + torch.arange(block_size, device=blocks.device)
    return entries.masked_fill((blocks < 0)[:, :, None], -1).flatten(1)


def block_mask(blocks: torch.Tensor, block_size: int, num_entries: int) -> torch.Tensor:
    """Return bool [t, num_entries]: whether each entry lies in one of the row's blocks."""
    entries = entries_of_blocks(blocks, block_size)
    mask = torch.zeros(blocks.shape[0], num_entries + 1, dtype=torch.bool, device=blocks.device)
    inside = (entries >= 0) & (entries < num_entries)
    mask.scatter_(1, entries.masked_fill(~inside, num_entries), 1)
    return mask[:, :num_entries]
