"""Planted faults of speculation on the executor: each patches one class; equality with plain runs must notice it."""

import numpy as np

from engine.runner import speculative
from engine.runner.row_mirror import RowMirror
from engine.sampling import Sampler
from engine.speculation.acceptance import SharedNoise


def histograms_count_rejected_drafts(patch):
    real = SharedNoise.judge

    def judge(self, index, logits, rows, positions, drafts):
        for row, draft in zip(rows.tolist(), drafts.tolist(), strict=True):
            if draft >= 0 and self._sampler._penalized[row]:
                self._sampler._counts.add(row, draft)
        return real(self, index, logits, rows, positions, drafts)

    patch.setattr(SharedNoise, "judge", judge)


def histograms_forget_accepted_drafts(patch):
    real = Sampler.settle

    def settle(self, host, rows, tokens):
        penalized = self._penalized.copy()
        if len(rows) == 1:
            self._penalized[:] = False
        output = real(self, host, rows, tokens)
        self._penalized[:] = penalized
        return output

    patch.setattr(Sampler, "settle", settle)


def one_wrong_draft_is_accepted(patch):
    real = speculative.accept_runs

    def accept(acceptance, logits, judged):
        run = real(acceptance, logits, judged)
        for i in np.flatnonzero(run.count < run.tokens.shape[1]):
            draft = judged.drafts[i, run.count[i] - 1]
            if draft >= 0:
                run.tokens[i, run.count[i] - 1] = draft
        return run

    patch.setattr(speculative, "accept_runs", accept)


def lengths_count_rejected_drafts(patch):
    real = speculative.accept_runs

    def accept(acceptance, logits, judged):
        run = real(acceptance, logits, judged)
        return type(run)(
            run.tokens,
            np.minimum(run.count + 1, (judged.drafts >= 0).sum(axis=1) + 1).astype(np.int32),
            run.logprobs,
            run.top_tokens,
            run.top_logprobs,
        )

    patch.setattr(speculative, "accept_runs", accept)


def noise_belongs_to_the_step_and_not_to_the_position(patch):
    real = SharedNoise.judge
    patch.setattr(
        SharedNoise,
        "judge",
        lambda self, index, logits, rows, positions, drafts: real(self, index, logits, rows, positions - index, drafts),
    )


def tables_end_at_the_lower_bound(patch):
    real = RowMirror.batch

    def batch(self, rows, q_start, seq_start, tokens, sample_at):
        made = real(self, rows, q_start, seq_start, tokens, sample_at)
        if len(rows) and int(np.diff(q_start).max()) > 1 and (seq_start > 0).any():
            made.page_table[:, -1] = 0
        return made

    patch.setattr(RowMirror, "batch", batch)


MUTANTS = (
    histograms_count_rejected_drafts,
    histograms_forget_accepted_drafts,
    one_wrong_draft_is_accepted,
    lengths_count_rejected_drafts,
    noise_belongs_to_the_step_and_not_to_the_position,
    tables_end_at_the_lower_bound,
)
