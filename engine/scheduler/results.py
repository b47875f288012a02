"""Takes in the result of a step: lengths, tokens, announcements, ends. One step behind the plans.

Rows whose owner changed since the step was planned are dropped by generation. Decode rows are handled as arrays; only
prompts, rows that asked for log-probabilities, and rows that end are touched one by one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.errors import BadRequest, InvariantError
from core.handover import TokenLogprobs
from core.request import FinishReason
from engine.events import SeqId
from engine.plan import Plan, StepResult
from engine.scheduler.admission import Admission
from engine.scheduler.departures import Departures
from engine.scheduler.holdings import Holdings
from engine.scheduler.outbox import Outbox
from engine.scheduler.row_table import RowFlag
from engine.scheduler.sources import Sources
from engine.sequence import Sequence

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_SMOOTHING = 0.2


@dataclass(slots=True)
class Meter:
    """Running figures of an engine; rates are smoothed over steps."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def note(self, prefill: int, decode: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.prefill_tokens += prefill
        self.decode_tokens += decode
        self.step_s += (seconds - self.step_s) * (_SMOOTHING if self.steps > 1 else 1)
        if prefill and seconds > 0:
            rate = (prefill + decode) / seconds
            known = self.prefill_tokens_per_s
            self.prefill_tokens_per_s = known + (rate - known) * _SMOOTHING if known else rate


class Results:
    """Processes step results of one engine. Scheduler thread only."""

    def __init__(
        self,
        holdings: Holdings,
        admission: Admission,
        sources: Sources,
        departures: Departures,
        outbox: Outbox,
    ) -> None:
        self._holdings = holdings
        self._admission = admission
        self._sources = sources
        self._departures = departures
        self._outbox = outbox
        self.meter = Meter()

    def process(self, plan: Plan, result: StepResult) -> None:
        """Take in `result`; afterwards every end it caused has given its pages back."""
        if result.step != plan.step:
            raise InvariantError(f"result of step {result.step} for the plan of step {plan.step}")
        self._holdings.retire(plan.step)
        self._note(plan, result)
        alive = plan.gens == self._holdings.rows.generation[plan.rows]
        for i, reason in result.refused:
            if alive[i]:
                self._departures.fail(self._sequence(int(plan.rows[i])), BadRequest(reason, param="response_format"))
                alive[i] = False
        self._take(plan, result, alive)

    def _note(self, plan: Plan, result: StepResult) -> None:
        total = int(plan.q_start[-1])
        decode = int(plan.use_next.sum())
        self._admission.tokens_done += total
        self.meter.note(total - decode, decode, result.forward_s)

    def _take(self, plan: Plan, result: StepResult, alive: Mask) -> None:
        """Take in what happened to the rows that still have their owner."""
        self._take_single(plan, result, alive)

    def _take_single(self, plan: Plan, result: StepResult, taken: Mask) -> None:
        """Take in rows [b] that computed what was planned and chose one token at most."""
        rows = self._holdings.rows
        ends = plan.seq_start + np.diff(plan.q_start)
        chosen = taken & (plan.sample == 1)
        if bool((result.count[chosen] < 1).any()):
            raise InvariantError(f"step {plan.step} chose no token where the plan asked for one")
        rows.committed[plan.rows[taken]] = ends[taken]
        index = plan.rows[chosen]
        tokens = result.tokens[chosen, 0]
        rows.tokens[index, ends[chosen]] = tokens
        rows.known[index] = ends[chosen] + 1
        for i in np.flatnonzero(taken & (plan.use_next == 0)).tolist():
            self._chunk_done(plan, result, i, int(ends[i]))
        emits = chosen & ((rows.flags[plan.rows] & RowFlag.SOURCE) == 0)
        self._emit(plan.rows[emits], ends[emits], result.tokens[emits, 0], result, np.flatnonzero(emits))

    def _chunk_done(self, plan: Plan, result: StepResult, i: int, end: int) -> None:
        """A prompt's chunk is in KV: publish its full pages, announce them, and hold a source at its end."""
        holdings = self._holdings
        seq = self._sequence(int(plan.rows[i]))
        start = int(plan.seq_start[i])
        seq.recomputed_tokens += max(0, min(end, seq.computed_tokens) - start)
        seq.computed_tokens = max(seq.computed_tokens, end)
        self.meter.replayed_tokens += max(0, min(end, seq.stage.write_from) - start)
        holdings.publish(seq, end)
        if end == seq.stage.end < int(holdings.rows.goal[seq.row]):
            holdings.begin_stage(seq, end)
        if seq.is_source:
            self._sources.announce(seq, end)
            if plan.sample[i]:
                token = int(result.tokens[i, 0])
                self._sources.hold(seq, token, self._logprobs(seq, result, i))
        if plan.sample[i] and not seq.has_started:
            seq.has_started = True
            self.meter.cached_tokens += max(0, seq.num_cached_tokens)
            if not seq.is_source:
                self._outbox.started(seq)

    def _emit(self, index: I32, positions: I32, tokens: I32, result: StepResult, at: I64) -> None:
        """Tell the tokens and end the rows that they, or the length bound, end. All arrays are parallel."""
        if not len(index):
            return
        rows = self._holdings.rows
        self._outbox.tokens(rows.seq[index], positions - rows.num_prompt[index], tokens)
        if result.logprobs is not None:
            for j in np.flatnonzero(rows.flags[index] & RowFlag.LOGPROBS).tolist():
                seq = self._sequence(int(index[j]))
                self._outbox.logprobs(seq.id, self._logprobs(seq, result, int(at[j])))
        stops = rows.is_stop(index, tokens, positions)
        over = stops | (positions + 1 >= rows.max_len[index])
        for j in np.flatnonzero(over).tolist():
            reason = FinishReason.STOP if stops[j] else FinishReason.LENGTH
            self._departures.finish(self._sequence(int(index[j])), reason)

    def _sequence(self, row: int) -> Sequence:
        return self._holdings.sequences[SeqId(int(self._holdings.rows.seq[row]))]

    def _logprobs(self, seq: Sequence, result: StepResult, i: int, count: int = 1) -> tuple[TokenLogprobs, ...]:
        """Return what row i of the result says of its first `count` tokens, or nothing if the request did not ask."""
        wanted = seq.request.sampling.num_logprobs
        if result.logprobs is None or wanted < 0:
            return ()
        return tuple(self._token_logprobs(result, i, column, wanted) for column in range(count))

    @staticmethod
    def _token_logprobs(result: StepResult, i: int, column: int, wanted: int) -> TokenLogprobs:
        assert result.logprobs is not None
        top: list[tuple[int, float]] = []
        if result.top_tokens is not None and result.top_logprobs is not None:
            tokens = result.top_tokens[i, column, :wanted].tolist()
            values = result.top_logprobs[i, column, :wanted].tolist()
            top = [(token, value) for token, value in zip(tokens, values, strict=True) if token >= 0]
        return TokenLogprobs(
            token=int(result.tokens[i, column]), logprob=float(result.logprobs[i, column]), top=tuple(top)
        )
