"""The draft model over the window rings of its stages: context rows in, proposals out.

Context is addressed by position and read by length, so rejected tokens need no clean-up. Rings travel with a hand-over
like all KV. Knows no acceptance rule.

Shape legend: n captured rows, b proposals, k drafts, W window, D head dim.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.models.deepseek_v41.blocks import Head
from engine.models.deepseek_v41.caches import Caches
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.dspark import Dspark
from engine.models.drafter import Captures, ChooseDraft, DraftRows, Proposal

I32 = npt.NDArray[np.int32]


class PagedDrafter:
    """Implements `engine.models.drafter.Drafter`."""

    def __init__(self, dspark: Dspark, head: Head, caches: Caches, config: V41Config) -> None:
        self.num_drafts = dspark.config.block_size
        self._dspark = dspark
        self._head = head
        self._rings = [caches.window(plan.index) for plan in config.stages]
        self._format = caches.window_format
        self._window = config.window
        self._dtype = caches.dtype

    def observe(self, batch: ForwardBatch, captures: Captures, committed: I32) -> None:
        """Write the context rows of captured tokens; those of rejected ones are overwritten before they are read."""
        at = captures.at.numpy()
        owner = np.searchsorted(batch.q_start, at, side="right") - 1
        ends = np.asarray(batch.q_start[owner] + committed[owner])
        # Of a long chunk only the end fits into the ring.
        chosen = torch.from_numpy(np.flatnonzero((at < ends) & (at >= ends - self._rings[0].capacity)))
        if not len(chosen):
            return
        positions = batch.positions[captures.at[chosen]]
        record = torch.from_numpy(batch.rows.astype(np.int64)[owner])[chosen]
        packed = self._format.pack(self._dspark.context(captures.values[chosen], positions))
        for ring, rows in zip(self._rings, packed, strict=True):
            ring.write(record, positions, rows)

    def propose(self, wanted: DraftRows, choose: ChooseDraft) -> Proposal:
        """Draft k tokens behind every anchor."""
        lengths = torch.from_numpy(wanted.lengths)
        records = torch.from_numpy(wanted.rows.astype(np.int64))[:, None].expand(-1, self._window)
        positions = lengths[:, None] + torch.arange(-self._window, 0)
        exists = positions >= 0

        def context(stage: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys = self._format.unpack(self._rings[stage].read(records, positions), self._dtype)
            # Rows below a replay floor were never written; drafts may be poor then, but not undefined.
            return keys.nan_to_num(0.0, 0.0, 0.0), exists

        found = self._dspark.propose(self._head, torch.from_numpy(wanted.anchors), lengths, context, choose)
        return Proposal(found.tokens.numpy(), found.confidences.float().numpy())
