import numpy as np
import pytest

from core.errors import InvariantError
from core.request import SamplingParams
from engine.plan import Plan, PlanExtra, RowInit
from engine.runner.stub_runner import StubRunner, mixed_tokens
from tests.fakes.engine_rig import Rig

PROMPT = list(range(1, 24))


def plan_of(step, sample=(1, 0), seeds=()):
    b = len(sample)
    inits = tuple(
        RowInit(
            row=row,
            generation=0,
            sampling=SamplingParams(seed=seed),
            token_ids=b"",
            num_prompt_tokens=1,
            min_tokens=0,
            masked_until_min=(),
        )
        for row, seed in enumerate(seeds)
    )
    return Plan(
        step=step,
        rows=np.arange(b, dtype=np.int32),
        gens=np.zeros(b, np.uint32),
        q_start=np.arange(b + 1, dtype=np.int32),
        seq_start=np.full(b, 5, np.int32),
        use_next=np.ones(b, np.uint8),
        sample=np.array(sample, np.uint8),
        tokens=np.zeros(b, np.int32),
        table_deltas=np.zeros((0, 3), np.int32),
        extra=PlanExtra(inits=inits),
    ).encode()


def test_tokens_follow_from_seed_and_position_and_only_where_asked():
    choose = mixed_tokens(50, first=10)
    runner = StubRunner(2, choose)
    result = runner.collect(runner.launch(plan_of(1, seeds=(3, 4))))
    assert result.count.tolist() == [1, 0]
    assert result.tokens[:, 0].tolist() == [int(choose(np.array([3], np.uint64), np.array([6]))[0]), -1]


def test_the_choice_covers_its_range_evenly():
    choose = mixed_tokens(20, first=4)
    tokens = choose(np.full(8000, 7, np.uint64), np.arange(8000))
    counts = np.bincount(tokens, minlength=20)
    assert not counts[:4].any()
    assert counts[4:].min() > 400


def test_each_sequence_has_its_own_text():
    rig = Rig(runner=StubRunner(8, mixed_tokens(90)))
    one, same, other = (rig.submit(PROMPT, 9, seed=seed) for seed in (1, 1, 2))
    rig.run()
    assert rig.sink.tokens[one] == rig.sink.tokens[same]
    assert rig.sink.tokens[one] != rig.sink.tokens[other]


def test_a_gap_between_plans_is_a_bug():
    runner = StubRunner(2, mixed_tokens(9))
    with pytest.raises(InvariantError, match="gap"):
        runner.launch(plan_of(2))


def test_a_third_step_in_flight_is_a_bug():
    runner = StubRunner(2, mixed_tokens(9))
    runner.launch(plan_of(1))
    runner.launch(plan_of(2))
    with pytest.raises(InvariantError, match="in flight"):
        runner.launch(plan_of(3))


def test_steps_are_collected_in_order_once():
    runner = StubRunner(2, mixed_tokens(9))
    first, second = runner.launch(plan_of(1)), runner.launch(plan_of(2))
    assert first.done()
    with pytest.raises(InvariantError):
        runner.collect(second)
    runner.collect(first)
    with pytest.raises(InvariantError):
        runner.collect(first)
    runner.collect(second)
    runner.close()


def test_a_virtual_duration_is_charged_when_a_step_is_collected():
    spent = []
    runner = StubRunner(2, mixed_tokens(9), step_s=lambda plan: spent.append(len(plan.rows)) or 0.0)
    handle = runner.launch(plan_of(1))
    assert spent == []
    runner.collect(handle)
    assert spent == [2]
