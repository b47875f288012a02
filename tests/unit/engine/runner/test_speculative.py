import numpy as np
import pytest
import torch

from core.request import SamplingParams
from engine.config import EngineConfig, SpeculationConfig
from engine.models.drafter import Captures, Proposal, SpeculativeModel
from engine.models.model import ModelFacts
from engine.plan import UNLIMITED, Plan, PlanExtra, RowInit, decode_plan
from engine.runner.executor import StepExecutor
from engine.runner.model_runner import ModelRunner
from engine.runner.speculative import SpeculativeExecutor

VOCAB, K = 50, 3


class CountingModel:
    """Prefers the token after each one; its drafter counts on, and errs where `wrong` says so."""

    facts = ModelFacts(
        name="counting",
        revision="r",
        tokenizer_digest="t",
        vocab_size=VOCAB,
        max_positions=64,
        eos_token_ids=(),
        kv_dtype="f32",
        history_tokens=2,
    )
    num_drafts = K
    device = torch.device("cpu")

    def __init__(self):
        self.batches, self.observed, self.wanted = [], [], []
        self.wrong = {}
        self.confidences = {}

    def kv_layout(self, num_pages, num_rows, page_tokens):
        raise AssertionError("not asked for here")

    def forward(self, batch, kv):
        self.batches.append(batch)
        return torch.nn.functional.one_hot((batch.token_ids[batch.sample_at] + 1) % VOCAB, VOCAB).float()

    def forward_captured(self, batch, kv):
        return self.forward(batch, kv), Captures(torch.arange(len(batch.token_ids)), batch.token_ids[:, None])

    def drafter(self, kv):
        return self

    def observe(self, batch, captures, committed):
        self.observed.append(dict(zip(batch.rows.tolist(), committed.tolist(), strict=True)))

    def propose(self, wanted, choose):
        self.wanted.append(
            list(zip(wanted.rows.tolist(), wanted.anchors.tolist(), wanted.lengths.tolist(), strict=True))
        )
        tokens = wanted.anchors[:, None] + np.arange(1, K + 1)
        for i, row in enumerate(wanted.rows.tolist()):
            if row in self.wrong:
                tokens[i, self.wrong[row]] = 0
        confidences = [self.confidences.get(row, [0.9, 0.8, 0.7]) for row in wanted.rows.tolist()]
        return Proposal(tokens, np.array(confidences, np.float32))


@pytest.fixture
def model():
    return CountingModel()


@pytest.fixture
def executor(model):
    return SpeculativeExecutor(model, None, config_of(), max_pages=6)


def config_of(**fields):
    return EngineConfig(**{"page_tokens": 4, "num_pages": 16, "num_rows": 4, "chunk_tokens": 16, **fields})


def init_of(row, tokens, next_token=-1, kv_limit=24, **sampling):
    return RowInit(
        row=row,
        generation=0,
        sampling=SamplingParams(temperature=0.0, **sampling),
        token_ids=np.array(tokens, np.int32).tobytes(),
        num_prompt_tokens=2,
        min_tokens=0,
        masked_until_min=(),
        next_token=next_token,
        kv_limit=kv_limit,
    )


def plan_of(step, rows, *, inits=(), budget=UNLIMITED):
    """`rows`: (row, tokens or how many at most, lower bound of its length, samples). Row r owns pages 3r+1 .. 3r+3."""
    lengths = [tokens if isinstance(tokens, int) else len(tokens) for _, tokens, _, _ in rows]
    ids = [t for _, tokens, *_ in rows for t in ([0] * tokens if isinstance(tokens, int) else tokens)]
    deltas = [(init.row, c, 3 * init.row + 1 + c) for init in inits for c in range(3)]
    return Plan(
        step=step,
        rows=np.array([row for row, *_ in rows], np.int32),
        gens=np.zeros(len(rows), np.uint32),
        q_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        seq_start=np.array([start for _, _, start, _ in rows], np.int32),
        use_next=np.array([isinstance(tokens, int) for _, tokens, _, _ in rows], np.uint8),
        sample=np.array([samples for *_, samples in rows], np.uint8),
        tokens=np.array(ids, np.int32),
        table_deltas=np.array(deltas, np.int32).reshape(-1, 3),
        extra=PlanExtra(inits=tuple(inits)),
        draft_budget=budget,
    )


def started(executor, row=0, kv_limit=24, **sampling):
    """A row whose prompt 10, 11 is computed; 12 was chosen and 13, 14, 15 are drafted."""
    return executor.run(
        plan_of(1, [(row, [10, 11], 0, 1)], inits=[init_of(row, [10, 11], kv_limit=kv_limit, **sampling)])
    )


def test_the_model_is_what_the_protocol_asks_for(model):
    assert isinstance(model, SpeculativeModel)


def test_a_prompt_brings_one_token_and_drafts_for_the_next_step(executor, model):
    result = started(executor)
    assert (result.tokens.tolist(), result.count.tolist()) == ([[12, -1, -1, -1]], [1])
    assert result.drafted.tolist() == [0]
    assert model.wanted == [[(0, 12, 2)]]
    assert result.confidences[0].tolist() == pytest.approx([0.9, 0.8, 0.7])


def test_right_drafts_bring_a_run_and_the_true_length_follows(executor, model):
    started(executor)
    result = executor.run(plan_of(2, [(0, 1 + K, 2, 1)]))
    assert model.batches[1].token_ids.tolist() == [12, 13, 14, 15]
    assert model.batches[1].positions.tolist() == [2, 3, 4, 5]
    assert result.tokens.tolist() == [[13, 14, 15, 16]]
    # The scheduler's bound is behind; the runner knows better.
    executor.run(plan_of(3, [(0, 1 + K, 3, 1)]))
    assert model.batches[2].seq_start.tolist() == [6]
    assert model.batches[2].token_ids.tolist() == [16, 17, 18, 19]
    assert model.batches[2].slots.tolist() == [2 * 4 + 2, 2 * 4 + 3, 3 * 4, 3 * 4 + 1]


def test_a_rejected_draft_ends_the_run_and_the_next_step_goes_on_from_there(executor, model):
    model.wrong[0] = 1
    started(executor)
    result = executor.run(plan_of(2, [(0, 1 + K, 2, 1)]))
    assert (result.tokens.tolist(), result.count.tolist()) == ([[13, 14, -1, -1]], [2])
    assert model.observed[1] == {0: 2}
    executor.run(plan_of(3, [(0, 1 + K, 3, 1)]))
    assert model.batches[2].token_ids.tolist()[0] == 14
    assert model.batches[2].seq_start.tolist() == [4]
    assert model.batches[2].history.tolist() == [[12, 13]]


def test_a_landed_row_verifies_nothing_in_its_first_step(executor, model):
    result = executor.run(plan_of(1, [(1, 1 + K, 2, 1)], inits=[init_of(1, [10, 11, 12], next_token=12)]))
    assert model.batches[0].token_ids.tolist() == [12]
    assert model.batches[0].positions.tolist() == [2]
    assert (result.tokens.tolist(), result.computed) == ([[13, -1, -1, -1]], 1)


def test_a_new_owner_inherits_no_drafts(executor, model):
    started(executor)
    executor.run(plan_of(2, [(0, 1 + K, 3, 1)], inits=[init_of(0, [30, 31, 32, 33], next_token=33)]))
    assert model.batches[1].token_ids.tolist() == [33]
    assert model.batches[1].positions.tolist() == [3]


def test_the_plan_s_width_bounds_the_drafts(executor, model):
    started(executor)
    result = executor.run(plan_of(2, [(0, 2, 2, 1)]))
    assert model.batches[1].token_ids.tolist() == [12, 13]
    assert result.tokens.tolist() == [[13, 14, -1, -1]]


def test_no_token_is_computed_beyond_the_row_s_limit(executor, model):
    started(executor, kv_limit=4)
    result = executor.run(plan_of(2, [(0, 1 + K, 2, 1)]))
    assert model.batches[1].token_ids.tolist() == [12, 13]
    assert result.tokens.tolist() == [[13, 14, -1, -1]]
    at_the_end = executor.run(plan_of(3, [(0, 1 + K, 3, 1)]))
    assert len(model.batches) == 2
    assert (at_the_end.count.tolist(), at_the_end.computed) == ([0], 0)


def test_a_row_at_its_limit_sits_beside_others_that_go_on(executor, model):
    started(executor, kv_limit=3)
    executor.run(plan_of(2, [(0, 1 + K, 2, 1)]))
    result = executor.run(plan_of(3, [(0, 1 + K, 3, 1), (2, [20, 21], 0, 1)], inits=[init_of(2, [20, 21])]))
    assert model.batches[2].rows.tolist() == [2]
    assert (result.tokens[:, 0].tolist(), result.count.tolist()) == ([-1, 22], [0, 1])


def test_no_drafts_are_made_for_a_row_whose_first_token_is_its_last(executor, model):
    result = started(executor, kv_limit=2)
    assert model.wanted == []
    assert np.isnan(result.confidences).all()


def test_a_chunk_that_chooses_nothing_is_observed_and_proposes_nothing(executor, model):
    result = executor.run(plan_of(1, [(0, [10, 11], 0, 0)], inits=[init_of(0, [10, 11, 12])]))
    assert result.count.tolist() == [0]
    assert model.observed == [{0: 2}]
    assert model.wanted == []


def test_a_budget_goes_to_the_most_confident_drafts(executor, model):
    model.confidences = {0: [0.5, 0.5, 0.5], 1: [0.9, 0.9, 0.1]}
    executor.run(
        plan_of(
            1,
            [(0, [10, 11], 0, 1), (1, [20, 21], 0, 1)],
            inits=[init_of(0, [10, 11]), init_of(1, [20, 21])],
        )
    )
    result = executor.run(plan_of(2, [(0, 1 + K, 2, 1), (1, 1 + K, 2, 1)], budget=3))
    assert model.batches[1].token_ids.tolist() == [12, 13, 22, 23, 24]
    assert result.drafted.tolist() == [1, 2]
    none = executor.run(plan_of(3, [(0, 1 + K, 3, 1), (1, 1 + K, 3, 1)], budget=0))
    assert (none.drafted.tolist(), none.count.tolist()) == ([0, 0], [1, 1])


def test_log_probabilities_come_per_token(executor):
    started(executor, num_logprobs=1)
    result = executor.run(plan_of(2, [(0, 1 + K, 2, 1)]))
    assert np.isfinite(result.logprobs).all()
    assert result.top_tokens[0, :, 0].tolist() == [13, 14, 15, 16]


def test_a_step_without_rows_is_legal(executor):
    result = executor.run(plan_of(1, []))
    assert result.tokens.shape == (0, 1 + K)


def test_the_budget_travels_in_the_plan():
    assert decode_plan(plan_of(1, [], budget=7).encode()).draft_budget == 7
    assert decode_plan(plan_of(1, []).encode()).draft_budget == UNLIMITED


@pytest.mark.parametrize(
    ("mode", "kind"), [("auto", SpeculativeExecutor), ("static", SpeculativeExecutor), ("off", StepExecutor)]
)
def test_the_runner_speculates_if_the_model_can_and_nobody_forbids_it(model, mode, kind):
    runner = ModelRunner(model, None, config_of(speculation=SpeculationConfig(mode=mode)), max_pages=6)
    try:
        assert isinstance(runner._executor, kind)
    finally:
        runner.close()


def test_the_model_is_given_steps_on_the_host(model):
    """Recorded steps are chosen and padded there; a model whose device is another one copies what it does not record."""
    model.device = torch.device("meta")
    executor = SpeculativeExecutor(model, None, config_of(), max_pages=6)
    started(executor)
    executor.run(plan_of(2, [(0, 4, 2, 1)]))
    assert [batch.token_ids.device.type for batch in model.batches] == ["cpu", "cpu"]
    assert all(batch.device_rows is None for batch in model.batches)
