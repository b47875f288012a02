"""Steps before the first request meet every kind of step that comes later, and leave nothing behind that a request sees."""

import dataclasses

import numpy as np
import pytest
import torch

from engine.cache.hit import ReuseKind, ReuseRule
from engine.plan import decode_plan
from engine.runner import model_runner
from engine.runner.device_executor import DeviceExecutor
from engine.runner.device_stream import ImmediateStream
from engine.runner.model_runner import ModelRunner
from engine.runner.speculative import SpeculativeExecutor
from engine.runner.warm_up import WarmUp
from tests.unit.engine.runner.test_model_runner import EchoModel
from tests.unit.engine.runner.test_speculative import CountingModel, K, config_of, init_of, plan_of

ROOM = 24


def no_memory():
    return 0, 0


def plans(drafts=0, room=ROOM, facts=CountingModel.facts, **fields):
    return list(WarmUp(config_of(**fields), facts, room, drafts).plans())


@pytest.mark.parametrize("drafts", [0, K])
@pytest.mark.parametrize("room", [1, 2, 9, ROOM, 1000])
@pytest.mark.parametrize("fields", [{}, {"num_rows": 1}, {"chunk_tokens": 600}, {"page_tokens": 1, "chunk_tokens": 1}])
def test_steps_are_legal_and_stay_within_rows_pages_and_chunks(drafts, room, fields):
    config = config_of(**fields)
    found = plans(drafts, room, **fields)
    assert len(found[0].tokens) == min(config.chunk_tokens, room)
    for plan in found:
        again = decode_plan(plan.encode())
        assert again.tokens.tolist() == plan.tokens.tolist()
        lengths = np.diff(plan.q_start)
        assert len(plan.rows) <= config.num_rows
        assert lengths.min() > 0
        assert (plan.seq_start + lengths <= room).all()
        prompts = lengths[plan.use_next == 0]
        assert prompts.sum() <= config.chunk_tokens
        assert (lengths[plan.use_next == 1] == 1 + drafts).all()
        assert not len(plan.table_deltas)


def test_prompts_come_in_every_size_divisible_by_16_and_not_alone_and_beside_a_row_that_decodes():
    found = plans(chunk_tokens=512, room=600)
    alone = {len(plan.tokens) for plan in found if len(plan.rows) == 1 and plan.seq_start[0] == 0}
    beside = {len(plan.tokens) - 1 for plan in found if len(plan.rows) == 2 and plan.use_next[0]}
    for size in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        assert {size, size - 1} - {0} <= alone
    assert alone - beside == {512}
    samplings = [plan.extra.inits[0].sampling for plan in found[:3]]
    assert [(s.temperature > 0, s.top_p < 1, s.num_logprobs > 0) for s in samplings] == [
        (True, True, True), (True, True, False), (False, False, False),
    ]  # fmt: skip


def test_a_model_that_leaves_rows_of_long_prompts_out_does_so():
    rule = ReuseRule(kind=ReuseKind.REPLAY, replay_tokens=4, keep_tokens=6)
    found = plans(facts=dataclasses.replace(CountingModel.facts, reuse=rule))
    known = {len(p.tokens): p.extra.inits[0].known_tokens for p in found if len(p.rows) == 1 and not p.seq_start[0]}
    assert {n: k for n, k in known.items() if k} == {n: n for n in known if n > 6}


def drafting(model):
    return SpeculativeExecutor(model, None, config_of(), max_pages=6), K


def on_device(model):
    return DeviceExecutor(model, None, config_of(), 6, stream=ImmediateStream()), 0


@pytest.mark.parametrize(("make", "kind"), [(drafting, CountingModel), (on_device, EchoModel)])
def test_a_request_behind_them_gets_what_it_gets_without_them(make, kind):
    said, seen = [], []
    for is_warm in (False, True):
        model = kind()
        executor, drafts = make(model)
        if is_warm:
            WarmUp(config_of(), model.facts, ROOM, drafts).run(executor, no_memory)
            assert model.batches
            model.batches.clear()
        results = [
            executor.run(plan_of(1, [(0, [3, 4], 0, 1), (1, 1 + drafts, 1, 1)], inits=[init_of(0, [3, 4]), init_of(1, [5, 6], next_token=6)])),
            executor.run(plan_of(2, [(0, 1 + drafts, 2, 1), (1, 1 + drafts, 2, 1)])),
            executor.run(plan_of(3, [(2, [1, 2, 3], 0, 1)], inits=[init_of(2, [1, 2, 3])])),
        ]  # fmt: skip
        said.append([(result.tokens.tolist(), result.count.tolist()) for result in results])
        names = ("token_ids", "positions", "slots", "history")
        seen.append([[None if (v := getattr(b, n)) is None else v.tolist() for n in names] for b in model.batches])
        executor.close()
    assert said[0] == said[1]
    assert seen[0] == seen[1]


def test_with_a_drafter_every_number_of_rows_verifies_and_proposes():
    model = CountingModel()
    executor, drafts = drafting(model)
    WarmUp(config_of(), model.facts, ROOM, drafts).run(executor, no_memory)
    assert {len(wanted) for wanted in model.wanted} >= {1, 2, 4}
    assert {len(batch.token_ids) for batch in model.batches if batch.num_rows == 4} == {4, 4 * (1 + K)}


@pytest.mark.parametrize(("device", "wanted", "is_warm"), [("cpu", True, False), ("meta", True, True), ("meta", False, False)])  # fmt: skip
def test_a_runner_runs_them_on_a_device_if_nobody_forbids_it(device, wanted, is_warm, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(model_runner, "make_current", lambda _: None)
    model = CountingModel()
    model.device = torch.device(device)
    ModelRunner(model, None, config_of(warm_up=wanted), max_pages=6).close()
    assert bool(model.batches) == is_warm
    assert any("steps in advance in" in line for line in caplog.messages) == is_warm
