"""What the scheduler knows of drafts: how confident each row's are, what steps cost, and how many were accepted.

Confidences arrive with results, so a plan's draft budget rests on those of two steps ago; which drafts fill it is
decided by the runner, which has newer ones. Scheduler thread only.
"""

import numpy as np
import numpy.typing as npt

from engine.plan import UNLIMITED, Plan, StepResult
from engine.scheduler.row_table import RowTable
from engine.speculation.budget import StepTimes, choose_budget, survivals

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


EXPLORE_EVERY = 64
"""Budgets between two that are unlimited, so that the time of wide steps is never known from long ago only."""


class DraftBook:
    """Drafts of one engine's rows, k = `num_drafts` each."""

    def __init__(self, rows: RowTable, num_drafts: int, *, by_confidence: bool) -> None:
        self._rows = rows
        self._by_confidence = by_confidence
        # A row of which nothing was heard yet counts as certain.
        self._survival = np.ones((rows.num_rows, num_drafts), np.float32)
        self._heard_of = np.zeros(rows.num_rows, np.uint32)
        self._times = StepTimes()
        self._budgets = 0
        self._drafted = np.zeros(num_drafts, np.int64)
        self._accepted = np.zeros(num_drafts, np.int64)

    def budget(self, index: I64, widths: I32 | np.int32, num_tokens: int) -> int:
        """Return how many drafts a step with decode rows `index` should verify; `num_tokens` are all it may compute."""
        if not self._by_confidence or not len(index) or not self._times.are_known:
            return UNLIMITED
        self._budgets += 1
        if self._budgets % EXPLORE_EVERY == 0:
            return UNLIMITED
        drafts = np.broadcast_to(widths - np.int32(1), index.shape)
        fresh = self._heard_of[index] == self._rows.generation[index]
        survival = np.where(fresh[:, None], self._survival[index], np.float32(1))
        survival = np.where(np.arange(survival.shape[1]) < drafts[:, None], survival, np.float32(0))
        return choose_budget(survival, num_tokens - int(drafts.sum()), self._times.seconds)

    def note(self, plan: Plan, result: StepResult, alive: Mask) -> None:
        """Take what a step says of drafts; `alive` [b] are the rows whose owner has not changed."""
        self._times.note(result.computed, result.forward_s)
        if result.confidences is not None:
            told = alive & (result.count > 0)
            index = plan.rows[told]
            self._survival[index] = survivals(result.confidences[told])
            self._heard_of[index] = plan.gens[told]
        if result.drafted is not None:
            place = np.arange(len(self._drafted))
            self._drafted += (place < result.drafted[:, None]).sum(axis=0)
            kept = np.where(result.drafted > 0, result.count - 1, 0)
            self._accepted += (place < kept[:, None]).sum(axis=0)

    def statistics(self) -> dict[str, int | float]:
        """Return counters: all drafts verified and accepted, and those by place in the row's proposal."""
        by_place = {f"drafts_accepted_at_{i}": int(count) for i, count in enumerate(self._accepted)}
        return {"drafts_verified": int(self._drafted.sum()), "drafts_accepted": int(self._accepted.sum()), **by_place}
