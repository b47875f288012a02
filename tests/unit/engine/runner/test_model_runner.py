import numpy as np
import pytest
import torch

from core.errors import InvariantError
from core.request import SamplingParams
from engine.config import EngineConfig
from engine.models.model import ModelFacts
from engine.plan import Plan, PlanExtra, RowInit
from engine.runner.executor import StepExecutor
from engine.runner.model_runner import ModelRunner

VOCAB = 10


class EchoModel:
    """Prefers the token after each row's last one; keeps the batches it saw."""

    device = torch.device("cpu")
    facts = ModelFacts(
        name="echo",
        revision="r",
        tokenizer_digest="t",
        vocab_size=VOCAB,
        max_positions=64,
        eos_token_ids=(),
        kv_dtype="f32",
    )

    def __init__(self):
        self.batches = []

    def forward(self, batch, kv):
        self.batches.append(batch)
        last = batch.token_ids[batch.sample_at]
        if (last == VOCAB - 1).any():
            raise RuntimeError("planted")
        return torch.nn.functional.one_hot(last + 1, VOCAB).float()


@pytest.fixture
def model():
    return EchoModel()


def config_of(**fields):
    return EngineConfig(**{"page_tokens": 4, "num_pages": 16, "num_rows": 4, "chunk_tokens": 16, **fields})


def init_of(row, next_token=-1, **sampling):
    return RowInit(
        row=row,
        generation=0,
        sampling=SamplingParams(temperature=0.0, **sampling),
        token_ids=np.array([1, 2], np.int32).tobytes(),
        num_prompt_tokens=2,
        min_tokens=0,
        masked_until_min=(),
        next_token=next_token,
    )


def plan_of(step, rows, *, deltas=(), inits=()):
    """`rows`: (row, tokens or None for the next token, tokens in KV, samples)."""
    lengths = [1 if tokens is None else len(tokens) for _, tokens, _, _ in rows]
    return Plan(
        step=step,
        rows=np.array([row for row, *_ in rows], np.int32),
        gens=np.zeros(len(rows), np.uint32),
        q_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        seq_start=np.array([start for _, _, start, _ in rows], np.int32),
        use_next=np.array([tokens is None for _, tokens, _, _ in rows], np.uint8),
        sample=np.array([samples for *_, samples in rows], np.uint8),
        tokens=np.array([t for _, tokens, _, _ in rows for t in (tokens or [0])], np.int32),
        table_deltas=np.array(deltas, np.int32).reshape(-1, 3),
        extra=PlanExtra(inits=tuple(inits)),
    )


def test_positions_slots_and_tables_follow_from_the_plan(model):
    executor = StepExecutor(model, None, config_of(), max_pages=6)
    executor.run(
        plan_of(
            1,
            [(2, [5, 6, 7], 3, 1), (0, [1, 2], 0, 0)],
            deltas=[(2, 0, 9), (2, 1, 4), (0, 0, 3), (2, 2, 8)],
            inits=[init_of(0), init_of(2)],
        )
    )
    batch = model.batches[0]
    assert batch.token_ids.tolist() == [5, 6, 7, 1, 2]
    assert batch.positions.tolist() == [3, 4, 5, 0, 1]
    assert batch.slots.tolist() == [9 * 4 + 3, 4 * 4, 4 * 4 + 1, 3 * 4, 3 * 4 + 1]
    assert batch.page_table.tolist() == [[9, 4], [3, 0]]
    assert batch.sample_at.tolist() == [2]
    assert (batch.rows.tolist(), batch.page_tokens) == ([2, 0], 4)


def test_columns_of_an_earlier_owner_are_never_seen(model):
    executor = StepExecutor(model, None, config_of(), max_pages=6)
    executor.run(plan_of(1, [(1, [1] * 12, 0, 0)], deltas=[(1, c, 5 + c) for c in range(3)], inits=[init_of(1)]))
    executor.run(
        plan_of(2, [(1, [1], 0, 0), (0, [1] * 8, 0, 0)], deltas=[(1, 0, 9), (0, 0, 2), (0, 1, 3)], inits=[init_of(0)])
    )
    assert model.batches[1].page_table.tolist() == [[9, 0], [2, 3]]


def test_a_row_decodes_the_token_that_its_last_step_chose(model):
    executor = StepExecutor(model, None, config_of(), max_pages=6)
    first = executor.run(
        plan_of(1, [(3, [1, 2], 0, 1), (1, [4], 0, 0)], deltas=[(3, 0, 1), (1, 0, 2)], inits=[init_of(1), init_of(3)])
    )
    assert (first.tokens[:, 0].tolist(), first.count.tolist()) == ([3, -1], [1, 0])
    second = executor.run(plan_of(2, [(3, None, 2, 1)]))
    assert model.batches[1].token_ids.tolist() == [3]
    assert second.tokens[:, 0].tolist() == [4]


def test_a_landed_row_begins_with_the_token_it_was_given(model):
    executor = StepExecutor(model, None, config_of(), max_pages=6)
    result = executor.run(plan_of(1, [(0, None, 2, 1)], deltas=[(0, 0, 1)], inits=[init_of(0, next_token=6)]))
    assert model.batches[0].token_ids.tolist() == [6]
    assert result.tokens[0, 0] == 7


def test_log_probabilities_are_spread_over_the_rows_that_asked(model):
    executor = StepExecutor(model, None, config_of(), max_pages=6)
    result = executor.run(
        plan_of(
            1,
            [(0, [1], 0, 0), (1, [2], 0, 1), (2, [3], 0, 1)],
            deltas=[(0, 0, 1), (1, 0, 2), (2, 0, 3)],
            inits=[init_of(0), init_of(1, num_logprobs=2), init_of(2)],
        )
    )
    assert np.isnan(result.logprobs[[0, 2]]).all()
    assert result.logprobs[1] == pytest.approx(1 - np.log(np.e + VOCAB - 1), abs=1e-5)
    assert result.top_tokens[1, 0, 0] == 3


def test_a_step_without_rows_is_legal(model):
    executor = StepExecutor(model, None, config_of(), max_pages=6)
    result = executor.run(plan_of(1, []))
    assert result.tokens.shape == (0, 1)
    assert model.batches == []


def test_a_chunk_that_chooses_nothing_still_computes(model):
    executor = StepExecutor(model, None, config_of(deterministic=False), max_pages=6)
    result = executor.run(plan_of(1, [(0, [9, 9], 0, 0)], deltas=[(0, 0, 1)], inits=[init_of(0)]))
    assert len(model.batches) == 1
    assert model.batches[0].deterministic is False
    assert result.count.tolist() == [0]


@pytest.fixture
def runner(model):
    runner = ModelRunner(model, None, config_of(), max_pages=6)
    yield runner
    runner.close()


def step(number, token=1):
    return plan_of(number, [(0, [token], 0, 1)], deltas=[(0, 0, 1)], inits=[init_of(0)]).encode()


def test_launched_steps_run_in_order_on_a_thread_of_their_own(runner):
    first, second = runner.launch(step(1, 1)), runner.launch(step(2, 2))
    assert runner.collect(first).tokens[0, 0] == 2
    assert runner.collect(second).tokens[0, 0] == 3
    assert second.done()


def test_a_gap_between_plans_is_a_bug(runner):
    with pytest.raises(InvariantError, match="gap"):
        runner.launch(step(2))


def test_a_third_step_in_flight_is_a_bug(runner):
    first, _ = runner.launch(step(1)), runner.launch(step(2))
    with pytest.raises(InvariantError, match="in flight"):
        runner.launch(step(3))
    runner.collect(first)
    runner.launch(step(3))


def test_what_a_step_raises_is_raised_at_collect_and_by_every_later_step(runner):
    first, second = runner.launch(step(1, VOCAB - 1)), runner.launch(step(2, 1))
    for handle in (first, second):
        with pytest.raises(RuntimeError, match="planted"):
            runner.collect(handle)


def test_close_finishes_queued_steps_and_is_idempotent(model):
    runner = ModelRunner(model, None, config_of(), max_pages=6)
    handle = runner.launch(step(1))
    runner.close()
    runner.close()
    assert handle.done()
