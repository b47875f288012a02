"""Planted faults of speculation in the scheduler: each patches one class; random traffic with drafts must notice it."""

import numpy as np

from engine.scheduler.growth import SpeculativeGrowth
from engine.scheduler.holdings import Holdings
from engine.scheduler.row_table import RowTable
from engine.scheduler.runs import RunResults
from engine.sequence import Sequence


def pages_beyond_what_is_committed_are_published(patch):
    real = Holdings.publish

    def publish(self, seq, num_tokens):
        if num_tokens == int(self.rows.committed[seq.row]) > len(seq.request.token_ids):
            size = self.config.page_tokens
            # As if the drafts of the last step had all been accepted.
            num_tokens = min(num_tokens + 3, int(self.rows.num_pages[seq.row]) * size)
        real(self, seq, num_tokens)

    patch.setattr(Holdings, "publish", publish)


def a_stop_inside_a_run_is_ignored(patch):
    real = RunResults._cut

    def cut(self, plan, result, at):
        rows, is_stop = self._holdings.rows, self._holdings.rows.is_stop
        last = rows.committed[plan.rows[at]] + result.count[at]

        def only_at_the_end(index, tokens, positions):
            return is_stop(index, tokens, positions) & np.isin(positions, last)

        rows.is_stop = only_at_the_end
        runs = real(self, plan, result, at)
        del rows.is_stop
        return runs

    patch.setattr(RunResults, "_cut", cut)


def bounds_are_never_narrowed(patch):
    real = RunResults._commit

    def commit(self, plan, runs):
        rows = self._holdings.rows
        before = rows.scheduled[runs.index].copy()
        real(self, plan, runs)
        rows.scheduled[runs.index] = np.maximum(rows.scheduled[runs.index], before)

    patch.setattr(RunResults, "_commit", commit)


def bounds_are_narrowed_too_far(patch):
    real = RunResults._commit

    def commit(self, plan, runs):
        real(self, plan, runs)
        rows = self._holdings.rows
        rows.scheduled[runs.index] = rows.committed[runs.index]
        rows.slack[runs.index] = 0

    patch.setattr(RunResults, "_commit", commit)


def pages_are_made_for_one_token_only(patch):
    real = SpeculativeGrowth.grow

    def grow(self, now):
        width, self._width = self._width, 1
        ready, widths = real(self, now)
        self._width = width
        limit = self._holdings.rows.kv_limit[ready] - self._least(ready)
        return ready, np.minimum(np.maximum(widths, width), limit).astype(np.int32)

    patch.setattr(SpeculativeGrowth, "grow", grow)


def rejected_drafts_are_told(patch):
    real = RunResults._take

    def take(self, plan, result, alive):
        decoding = (plan.use_next == 1) & (result.count > 0)
        count = np.where(decoding, np.minimum(result.count + 1, np.diff(plan.q_start)), result.count)
        tokens = np.maximum(result.tokens, 0)
        changed = type(result)(
            step=result.step, tokens=tokens, count=count, drafted=result.drafted, computed=result.computed
        )
        real(self, plan, changed, alive)

    patch.setattr(RunResults, "_take", take)


def a_new_owner_inherits_slack(patch):
    real = RowTable.take

    def take(self, seq, state):
        free = self._free[-1] if self._free else None
        kept = int(self.slack[free]) if free is not None else 0
        row = real(self, seq, state)
        self.slack[row] = kept
        return row

    patch.setattr(RowTable, "take", take)


def rows_run_past_their_limit(patch):
    real = Sequence.kv_limit
    patch.setattr(Sequence, "kv_limit", lambda self, max_len, pool: real(self, max_len, pool) + 2)


MUTANTS = (
    pages_beyond_what_is_committed_are_published,
    a_stop_inside_a_run_is_ignored,
    bounds_are_never_narrowed,
    bounds_are_narrowed_too_far,
    pages_are_made_for_one_token_only,
    rejected_drafts_are_told,
    a_new_owner_inherits_slack,
    rows_run_past_their_limit,
)
