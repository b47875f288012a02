"""Turns plans into tokens with a drafter: up to 1 + k per row and step, of which the target model chose every one.

The lengths of decode rows live here; the scheduler knows bounds of them and learns them one step late. A rejected
draft leaves nothing behind: its KV lies beyond the row's length and is written again before anybody reads it. Executor
thread only. Knows no sequences, no stop rules and no acceptance rule.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.row_grammars import RowGrammars
from engine.models.drafter import DraftRows, SpeculativeModel
from engine.models.model import KVTensors
from engine.plan import UNLIMITED, Plan, RowInit, StepResult
from engine.runner.device_sampler import DeviceSampler
from engine.runner.device_stream import stream_of
from engine.runner.executor import spread
from engine.runner.row_images import row_images
from engine.runner.row_mirror import MAX_ROW_TOKENS, RowMirror
from engine.sampling import Sampler
from engine.speculation.acceptance import (
    NO_DRAFT,
    Acceptance,
    ChainRule,
    Judged,
    Run,
    SharedNoise,
    accept_runs,
    host_of,
)
from engine.speculation.budget import survivals, verify_lengths

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

MIN_ROOM = 2
"""Tokens that a row's KV must have room for before drafts are worth making: the anchor and one draft."""


@dataclass(frozen=True, slots=True)
class _Laid:
    """The a rows of a plan that compute something, with their true lengths."""

    at: I64  # [a] indices into the plan
    rows: I32  # [a]
    start: I32  # [a] tokens in KV before the step
    lengths: I32  # [a] query tokens
    decoding: npt.NDArray[np.bool_]  # [a]
    sampling: npt.NDArray[np.bool_]  # [a]


class SpeculativeExecutor:
    """`Executor` for a model with a drafter."""

    def __init__(
        self,
        model: SpeculativeModel,
        kv: KVTensors,
        config: EngineConfig,
        max_pages: int,
        *,
        grammars: GrammarCompiler | None = None,
        wall_time: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._kv = kv
        self._wall_time = wall_time
        self._grammars = RowGrammars(grammars)
        self._sampler = Sampler(config.num_rows, model.facts.vocab_size, self._grammars.barrier)
        self._mirror = RowMirror(config, max_pages, model.facts.history_tokens, row_images(model, config))
        self._drafter = model.drafter(kv)
        self._k = self._drafter.num_drafts
        assert self._k < MAX_ROW_TOKENS, f"{self._k} drafts are more than rows have room for"
        self._acceptance = self._rule(config)
        self._length = np.zeros(config.num_rows, np.int32)
        self._kv_limit = np.zeros(config.num_rows, np.int64)
        self._drafts = np.full((config.num_rows, self._k), NO_DRAFT, np.int64)
        self._num_drafts = np.zeros(config.num_rows, np.int32)
        self._survival = np.zeros((config.num_rows, self._k), np.float32)

    def _rule(self, config: EngineConfig) -> Acceptance:
        if config.speculation.acceptance == "chain_rule":
            return ChainRule(self._sampler)
        device, vocab = self._model.device, self._model.facts.vocab_size
        if device.type != "cuda":
            return SharedNoise(self._sampler)
        with torch.inference_mode():
            rows = config.num_rows * (1 + self._k)
            return SharedNoise(self._sampler, DeviceSampler(rows, vocab, stream_of(device), ahead=self._k))

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        started = self._wall_time()
        self._mirror.set_up(plan)
        for init in plan.extra.inits:
            self._set_row(init)
        num_rows = len(plan.rows)
        laid = self._lay_out(plan)
        if not len(laid.at):
            blank = np.full((num_rows, 1 + self._k), -1, np.int32)
            return StepResult(step=plan.step, tokens=blank, count=np.zeros(num_rows, np.int32), computed=0)
        batch, judged, asking = self._batch(plan, laid)
        self._grammars.begin(judged.rows)
        logits, captures = self._model.forward_captured(batch, self._kv)
        self._grammars.finish()
        run = accept_runs(self._acceptance, logits, judged)
        committed = laid.lengths.copy()
        committed[asking] = np.where(laid.decoding[asking], run.count, laid.lengths[asking])
        self._length[laid.rows] = laid.start + committed
        self._keep(judged, run)
        self._grammars.take(judged.rows, run.tokens, run.count)
        failures = self._grammars.failures(judged.rows)
        self._drafter.observe(batch, captures, committed)
        confidences = self._propose(judged.rows)
        chosen = laid.at[asking]
        tokens, count = np.full((num_rows, 1 + self._k), -1, np.int32), np.zeros(num_rows, np.int32)
        tokens[chosen], count[chosen] = run.tokens, run.count
        drafted = np.zeros(num_rows, np.int32)
        drafted[laid.at] = np.where(laid.decoding, laid.lengths - 1, 0)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            count=count,
            logprobs=spread(run.logprobs, chosen, num_rows, np.float32(np.nan)),
            top_tokens=spread(run.top_tokens, chosen, num_rows, np.int32(-1)),
            top_logprobs=spread(run.top_logprobs, chosen, num_rows, np.float32(np.nan)),
            forward_s=self._wall_time() - started,
            drafted=drafted,
            confidences=spread(confidences, chosen, num_rows, np.float32(np.nan)),
            refused=tuple((int(chosen[i]), reason) for i, reason in failures),
            computed=int(laid.lengths.sum()),
        )

    def close(self) -> None:
        self._grammars.close()

    def _set_row(self, init: RowInit) -> None:
        row = init.row
        self._sampler.set_row(init)
        self._grammars.set_row(init)
        self._num_drafts[row] = 0
        self._kv_limit[row] = init.kv_limit
        if init.next_token >= 0:
            # A landed row: all its known tokens but the last are in KV.
            self._length[row] = len(init.token_ids) // 4 - 1

    def _lay_out(self, plan: Plan) -> _Laid:
        """Decide how many query tokens each row really has; rows that are at their limit have none."""
        start, lengths = plan.seq_start.copy(), np.diff(plan.q_start)
        decoding = plan.use_next == 1
        rows = plan.rows[decoding]
        start[decoding] = self._length[rows]
        room = self._kv_limit[rows] - self._length[rows]
        drafts = np.minimum(np.minimum(self._num_drafts[rows], lengths[decoding] - 1), np.maximum(0, room - 1))
        if plan.draft_budget != UNLIMITED:
            there = np.arange(self._k) < drafts[:, None]
            drafts = verify_lengths(np.where(there, self._survival[rows], np.float32(0)), plan.draft_budget)
        lengths[decoding] = np.where(room > 0, 1 + drafts, 0)
        at = np.flatnonzero(lengths > 0)
        return _Laid(
            at=at,
            rows=plan.rows[at],
            start=start[at],
            lengths=lengths[at],
            decoding=decoding[at],
            sampling=plan.sample[at] == 1,
        )

    def _batch(self, plan: Plan, laid: _Laid) -> tuple[ForwardBatch, Judged, I64]:
        """Return the step's tensors, what is to be judged, and which of the laid rows that is."""
        q_start = np.zeros(len(laid.at) + 1, np.int32)
        np.cumsum(laid.lengths, out=q_start[1:])
        owner = np.repeat(np.arange(len(laid.at)), laid.lengths)
        column = np.arange(len(owner)) - q_start[:-1][owner]
        ids = plan.tokens[plan.q_start[laid.at][owner] + column].astype(np.int64)
        decoding = laid.decoding[owner]
        row = laid.rows[owner]
        draft = self._drafts[row, np.clip(column - 1, 0, self._k - 1)]
        ids[decoding] = np.where(column == 0, self._mirror.next_token[row], draft)[decoding]
        wanted = decoding | ((column == laid.lengths[owner] - 1) & laid.sampling[owner])
        asking = np.flatnonzero(laid.sampling)
        num_drafts = np.where(laid.decoding, laid.lengths - 1, 0)[asking]
        ends = laid.start + np.where(laid.decoding, 1, laid.lengths)
        there = np.arange(self._k + 1) < num_drafts[:, None]
        padded = np.concatenate((self._drafts[laid.rows[asking]], np.full((len(asking), 1), NO_DRAFT)), axis=1)
        judged = Judged(
            rows=laid.rows[asking],
            first=np.cumsum(num_drafts + 1) - (num_drafts + 1),
            positions=ends[asking].astype(np.int64),
            drafts=np.where(there, padded, NO_DRAFT),
        )
        batch = self._mirror.batch(laid.rows, q_start, laid.start, ids, np.flatnonzero(wanted))
        return batch, judged, asking

    def _keep(self, judged: Judged, run: Run) -> None:
        """Remember what was chosen: the last token of each row is computed next."""
        if len(judged.rows):
            self._mirror.next_token[judged.rows] = run.tokens[np.arange(len(run.count)), run.count - 1]

    def _propose(self, rows: I32) -> F32:
        """Make drafts for the rows that just chose a token; returns confidences float32 [m, k], NaN without drafts."""
        confidences = np.full((len(rows), self._k), np.nan, np.float32)
        self._num_drafts[rows] = 0
        wanting = np.flatnonzero(self._kv_limit[rows] - self._length[rows] >= MIN_ROOM)
        if not len(wanting):
            return confidences
        rows = rows[wanting]
        lengths = self._length[rows].astype(np.int64)

        def choose(index: int, logits: torch.Tensor) -> torch.Tensor:
            positions = lengths + 1 + index
            found = self._acceptance.chosen(logits, rows, positions)
            if found is not None:  # so none of the rows has a grammar
                return found
            drafts = self._acceptance.choose(index, host_of(logits), rows, positions)
            self._grammars.draft(rows, drafts)
            return torch.from_numpy(drafts).to(logits.device)

        self._grammars.draft_from(rows)
        proposal = self._drafter.propose(DraftRows(rows, self._mirror.next_token[rows], lengths), choose)
        self._grammars.proposed(rows, proposal.tokens)
        self._drafts[rows] = proposal.tokens
        self._num_drafts[rows] = self._k
        self._survival[rows] = survivals(proposal.confidences)
        confidences[wanting] = proposal.confidences
        return confidences
