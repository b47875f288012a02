"""Selection of entries on a device: scores over paged keys, the best k, candidate blocks for later layers.

The rules are those of `indexer`. Where every entry that the page table has room for would be chosen, nothing is scored.
Shapes depend on numbers of rows and on the width of the table only, so that a step can be captured.

Shape legend: t tokens, h index heads, w index head dim, k selected, p pages per sequence, e entries per page.
"""

import torch

from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.memory import EntryPages
from engine.models.deepseek_v41.device.ops import Ops
from engine.models.deepseek_v41.device.rows import DeviceStep
from engine.models.deepseek_v41.layer_map import LayerPlan

_SCORE_BYTES = 1 << 30
"""Most bytes of scores at a time."""
_MOST_TOGETHER = 8
"""Tokens of a sequence that share one scan at most: verified drafts do, prompts have few pages."""


class Selections:
    """What the rows of one step selected so far; one per run of layers with the same rows."""

    def __init__(self, step: DeviceStep, config: V41Config, ops: Ops) -> None:
        self._ops = ops
        self._top_k = config.index.top_k
        self._rules = config.candidates
        self._step = step
        self._pages = step.sequences.pages[step.tokens.owner]
        self._by_source: dict[int, torch.Tensor] = {}
        self._blocks: torch.Tensor | None = None

    def of(self, source: int) -> torch.Tensor:
        """Return the selection int32 [t, k] of an index source: ascending, -1 behind the last."""
        return self._by_source[source]

    def select(self, plan: LayerPlan, heads: torch.Tensor, weights: torch.Tensor, keys: EntryPages) -> None:
        """Select for a layer; `heads` bfloat16 [t, h, w] in the index format, `weights` float32 [t, h]."""
        visible = self.visible(plan.m)
        width = self._pages.shape[1] * keys.each
        if plan.uses_candidates and self._blocks is not None:
            self._by_source[plan.index] = self._in_blocks(heads, weights, keys, visible, self._blocks)
            return
        rules = self._rules if plan.is_candidate_source else None
        is_narrow = width <= self._top_k
        restricts = rules is not None and width > rules.block_size * rules.top_blocks
        if is_narrow and not restricts:
            self._by_source[plan.index] = self._everything(visible)
            return
        chosen, blocks = list[torch.Tensor](), list[torch.Tensor]()
        rows = max(1, _SCORE_BYTES // (4 * width))
        for first in range(0, len(visible), rows):
            part = slice(first, first + rows)
            seen = visible[part]
            scores = torch.empty(len(seen), width, dtype=torch.float32, device=heads.device)
            together = self._together if rows >= len(visible) else None
            pages, *starts = (self._pages[part],) if together is None else together
            self._ops.index_scores(
                heads[part], weights[part], keys.key_codes, keys.key_scales, pages, seen, scores, *starts
            )
            chosen.append(self._ops.select_top(scores, seen, self._top_k, 1))
            if rules is not None and restricts:
                blocks.append(self._ops.select_top(scores, seen, rules.top_blocks, rules.block_size))
        self._by_source[plan.index] = _joined(chosen)
        if blocks:
            self._blocks = _joined(blocks)

    @property
    def _together(self) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Pages by sequence, first tokens and most of them, if sequences of some tokens each are scanned once a sequence."""
        step = self._step
        if step.tokens.at is not None or not 1 < step.max_tokens <= _MOST_TOGETHER:
            return None
        return step.sequences.pages, step.sequences.laid.q_start, step.max_tokens

    def visible(self, m: int) -> torch.Tensor:
        """Return int32 [t]: entries that every token sees."""
        return self._step.visible(m)

    def _everything(self, visible: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(self._top_k, dtype=torch.int32, device=visible.device).expand(len(visible), -1)
        return numbers.masked_fill(numbers >= visible[:, None], -1)

    def _in_blocks(
        self, heads: torch.Tensor, weights: torch.Tensor, keys: EntryPages, visible: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        assert self._rules is not None
        size = self._rules.block_size
        scores = self._ops.block_scores(
            heads, weights, keys.key_codes, keys.key_scales, self._pages, visible, blocks, size
        )
        # Columns are in the order of entries, so ties go to the lowest entry here, too.
        count = torch.full_like(visible, scores.shape[1])
        return self._ops.block_entries(self._ops.select_top(scores, count, self._top_k, 1), blocks, size)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
