"""Selection of entries by rows of a batch whose index keys lie in pages: scores, the best k, candidate blocks.

Rules and ties are those of `indexer`; here sequences of similar length are scored together, and long prompts in slices,
so that scores never take more than a fixed budget of memory. A row's selection depends on nothing but the row: products
of quantized queries and keys are exact in float32, and heads are summed in one fixed order (A14).

Shape legend: s padded rows, g sequences scored together, q rows of each, h index heads, w index head dim, n entries.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.models.deepseek_v41.caches import Caches, Places
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.indexer import IndexQueries, block_mask, candidate_blocks, select_top
from engine.models.deepseek_v41.layer_map import LayerPlan
from engine.models.deepseek_v41.step_rows import StepRows

_SCORE_BYTES = 32 << 20
"""Most bytes of per-head products at a time."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Entries that rows read; columns are in entry order."""

    places: Places  # record (page) and row inside the page's part, int64 [s, k] each
    valid: torch.Tensor  # bool [s, k]; where false, the place is the SINK page's first


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equally many rows and similarly many visible entries."""

    tokens: torch.Tensor  # int64 [g, q] indices among the step's rows
    pages: torch.Tensor  # int64 [g, p]
    visible: torch.Tensor  # int64 [g, q]
    most: int
    """Largest number in `visible`."""


class PagedIndex:
    """Selections of one step for rows of one ratio m; one per run of layers."""

    def __init__(self, rows: StepRows, batch: ForwardBatch, m: int, config: V41Config) -> None:
        self._rows = rows
        self._per_page = batch.page_tokens // m
        self._top_k = config.index.top_k
        rules = self._rules = config.candidates
        self._enough = self._top_k if rules is None else min(self._top_k, rules.block_size * rules.top_blocks)
        """So many visible entries are all selected, and lie in candidate blocks."""
        self._row_table = rows.table()
        self._visible = rows.visible(m)
        self._groups = self._group(batch.page_table.numpy(), config.index.num_heads)
        self._seen = torch.zeros(rows.size, dtype=torch.int64)
        self._seen[: rows.num] = torch.from_numpy(self._visible)
        self._widest = int(self._visible.max(initial=0))

    def everything(self) -> Selection:
        """Select all visible entries."""
        return self._placed(_all_of(self._seen, self._widest))

    def select(
        self, plan: LayerPlan, queries: IndexQueries, caches: Caches, candidates: torch.Tensor | None
    ) -> tuple[Selection, torch.Tensor | None]:
        """Return the selection of a layer, and the candidate blocks int64 [s, top_blocks] if it is their source.

        `candidates` are those that the layer is restricted to, if it is; None if it is not.
        """
        size, rules = self._rows.size, self._rules
        chosen = torch.full((size, self._top_k), -1, dtype=torch.int64)
        blocks = None
        if rules is not None and plan.is_candidate_source:
            blocks = torch.full((size, rules.top_blocks), -1, dtype=torch.int64)
        for group in self._groups:
            tokens, visible = group.tokens.flatten(), group.visible.flatten()
            if group.most <= self._enough:
                # Nothing to choose: scores would only confirm it.
                _put(chosen, tokens, _all_of(visible, group.most))
                if blocks is not None and rules is not None:
                    _put(blocks, tokens, _all_of(-(-visible // rules.block_size), -(-group.most // rules.block_size)))
                continue
            assert plan.kv_source is not None
            keys = caches.index_keys(plan.kv_source, group.pages)[:, : group.most]
            scores = _scores(queries.take(tokens), keys, group.tokens.shape[1])
            allowed = torch.arange(group.most) < visible[:, None]
            if rules is not None and blocks is not None:
                _put(blocks, tokens, candidate_blocks(scores, visible, rules.block_size, rules.top_blocks))
            if rules is not None and candidates is not None:
                allowed = allowed & block_mask(candidates[tokens], rules.block_size, group.most)
            _put(chosen, tokens, select_top(scores, allowed, self._top_k))
        return self._placed(chosen), blocks

    def _placed(self, entries: torch.Tensor) -> Selection:
        valid = entries >= 0
        entries = entries.clamp(min=0)
        column = (entries // self._per_page).clamp(max=self._row_table.shape[1] - 1)
        page = self._row_table.gather(1, column).masked_fill(~valid, 0)
        return Selection(Places(page, entries % self._per_page), valid)

    def _group(self, table: np.ndarray[tuple[int, int], np.dtype[np.int64]], heads: int) -> list[_Group]:
        """Cut the step's sequences into groups: equal numbers of rows, at most twice the entries, bounded products."""
        rows, found = self._rows, list[_Group]()
        busy = np.flatnonzero(rows.lengths > 0)
        last = self._visible[rows.begin[1:][busy] - 1]
        order = np.lexsort((-last, rows.lengths[busy]))
        busy, last = busy[order], last[order]
        begin = 0
        while begin < len(busy):
            length, most = int(rows.lengths[busy[begin]]), int(last[begin])
            room = max(1, _SCORE_BYTES // (4 * heads * max(1, most)))
            alike = (rows.lengths[busy] == length) & (2 * last + 32 >= most)
            end = begin + 1
            while end < len(busy) and alike[end] and (end - begin + 1) * length <= room:
                end += 1
            chosen = busy[begin:end]
            pages = torch.from_numpy(table[chosen, : -(-max(1, most) // self._per_page)])
            for first in range(0, length, room):
                inside = np.arange(first, min(length, first + room))
                tokens = rows.begin[chosen][:, None] + inside
                visible = self._visible[tokens]
                found.append(
                    _Group(torch.from_numpy(tokens), pages, torch.from_numpy(visible), int(visible.max(initial=0)))
                )
            begin = end
        return found


def _all_of(counts: torch.Tensor, most: int) -> torch.Tensor:
    """Return int64 [n, most]: 0, 1, 2 .. counts[i] - 1, then -1."""
    numbers = torch.arange(most).expand(len(counts), -1)
    return numbers.masked_fill(numbers >= counts[:, None], -1)


def _put(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    target[rows, : values.shape[1]] = values


def _scores(queries: IndexQueries, keys: torch.Tensor, rows_each: int) -> torch.Tensor:
    """Return [g q, n]: scores of g sequences' rows, in their order, against keys [g, n, w]."""
    num_rows, heads, width = queries.heads.shape
    grouped = queries.heads.reshape(-1, rows_each * heads, width)
    products = (grouped @ keys.transpose(-1, -2)).relu_().view(num_rows, heads, -1)
    parts = products.mul_(queries.weights[:, :, None])
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        folded = parts[:, :half] + parts[:, half : 2 * half]
        parts = torch.cat((folded, parts[:, 2 * half :]), 1) if parts.shape[1] % 2 else folded
    return parts[:, 0]
