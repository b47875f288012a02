"""Takes in results of steps with drafts: every decode row brings a run of tokens, and its length with it.

A stop inside a run cuts it there. What was chosen behind the cut never becomes known, and its KV lies beyond the
committed length.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from core.request import FinishReason
from engine.plan import Plan, StepResult
from engine.scheduler.admission import Admission
from engine.scheduler.departures import Departures
from engine.scheduler.draft_book import DraftBook
from engine.scheduler.holdings import Holdings
from engine.scheduler.outbox import Outbox
from engine.scheduler.results import Results
from engine.scheduler.row_table import RowFlag
from engine.scheduler.sources import Sources

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Runs:
    """Decode rows of a step, n of them, and the t tokens that stand; those of a row lie together."""

    at: I64  # [n] indices into the plan
    index: I32  # [n] rows
    start: I32  # [n] tokens in KV before the step
    count: I32  # [n] tokens that stand; may be 0: the row was at the end of its pages
    stopped: Mask  # [n] the last of them is a stop token
    owner: I64  # [t] index into n
    tokens: I32  # [t]
    positions: I32  # [t]


class RunResults(Results):
    """`Results` of an engine that speculates."""

    def __init__(
        self,
        holdings: Holdings,
        admission: Admission,
        sources: Sources,
        departures: Departures,
        outbox: Outbox,
        *,
        drafts: DraftBook,
    ) -> None:
        super().__init__(holdings, admission, sources, departures, outbox)
        self._drafts = drafts

    def _note(self, plan: Plan, result: StepResult) -> None:
        decoding = plan.use_next == 1
        prefill = int(np.diff(plan.q_start)[~decoding].sum())
        self._admission.tokens_done += result.computed
        self.meter.note(prefill, int(result.count[decoding].sum()), result.forward_s)

    def _take(self, plan: Plan, result: StepResult, alive: Mask) -> None:
        self._drafts.note(plan, result, alive)
        decoding = plan.use_next == 1
        runs = self._cut(plan, result, np.flatnonzero(alive & decoding))
        self._commit(plan, runs)
        self._take_single(plan, result, alive & ~decoding)
        self._emit_runs(runs, result)

    def _cut(self, plan: Plan, result: StepResult, at: I64) -> _Runs:
        """Return the runs of the rows `at`, each up to its first stop token."""
        rows = self._holdings.rows
        index = plan.rows[at]
        start, count = rows.committed[index], result.count[at]
        if bool((count > np.diff(plan.q_start)[at]).any()):
            raise InvariantError(f"step {plan.step} chose more tokens than were planned")
        owner, column = np.nonzero(np.arange(result.tokens.shape[1], dtype=np.int32) < count[:, None])
        tokens, positions = result.tokens[at[owner], column], start[owner] + 1 + column.astype(np.int32)
        stops = rows.is_stop(index[owner], tokens, positions)
        stopped = np.zeros(len(at), np.bool_)
        if stops.any():
            stopped[owner[stops]] = True
            # Backwards, so that the first stop of a row is the last to be written.
            count[owner[stops][::-1]] = column[stops][::-1] + 1
            stands = column < count[owner]
            owner, tokens, positions = owner[stands], tokens[stands], positions[stands]
        return _Runs(at, index, start, count, stopped, owner, tokens, positions)

    def _commit(self, plan: Plan, runs: _Runs) -> None:
        """Bring lengths and known tokens up to what stands; the bounds of rows with a later step in flight narrow."""
        rows, index = self._holdings.rows, runs.index
        planned = np.diff(plan.q_start)[runs.at]
        rows.committed[index] = runs.start + runs.count
        rows.scheduled[index] -= planned - runs.count
        rows.slack[index] -= planned - np.int32(1)
        rows.tokens[index[runs.owner], runs.positions] = runs.tokens
        rows.known[index] = runs.start + runs.count + 1

    def _emit_runs(self, runs: _Runs, result: StepResult) -> None:
        """Tell the tokens and end the rows that they, or the length bound, end."""
        if not len(runs.owner):
            return
        rows, index = self._holdings.rows, runs.index
        speakers = index[runs.owner]
        self._outbox.tokens(rows.seq[speakers], runs.positions - rows.num_prompt[speakers], runs.tokens)
        if result.logprobs is not None:
            for j in np.flatnonzero(rows.flags[index] & RowFlag.LOGPROBS).tolist():
                seq = self._sequence(int(index[j]))
                items = self._logprobs(seq, result, int(runs.at[j]), int(runs.count[j]))
                self._outbox.logprobs(seq.id, items)
        over = runs.stopped | (runs.start + runs.count + 1 >= rows.max_len[index])
        for j in np.flatnonzero(over).tolist():
            reason = FinishReason.STOP if runs.stopped[j] else FinishReason.LENGTH
            self._departures.finish(self._sequence(int(index[j])), reason)
