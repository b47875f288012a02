"""The executor of devices, over a stream that does everything at once, gives the tokens of the one of host memory."""

import functools
import random

import pytest
import torch

from benchmarks.engine_texts import SAMPLINGS
from engine.config import GraphsConfig, SpeculationConfig
from engine.runner.decode_graphs import DecodeGraphs
from engine.runner.warm_up import WarmUp
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import FAR, ModelRig, device_model_of, hand_over, model_of
from tests.integration.test_grammar_equality import GRAMMARS

OUTPUTS = 10


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(97, 120) for _ in range(length)]


def traffic(rig):
    """Requests of all kinds that come while others decode; returns what each was answered."""
    seqs = []
    for i, sampling in enumerate(SAMPLINGS):
        fields = {"grammar": GRAMMARS["regex"], "ignore_eos": False} if i == 3 else {}
        if i == 2:
            fields = {"min_tokens": 6, "stop_token_ids": (101, 104), "ignore_eos": False}
        base = request_of(prompt_of(i % 7, 3 + 11 * (i % 5)), OUTPUTS, name=f"r{i}", **fields)
        request = type(base)(
            **{f: getattr(base, f) for f in base.__struct_fields__ if f != "sampling"}, sampling=sampling
        )
        seqs.append(rig.engine.submit(request, FAR))
        rig.turn()
    rig.run()
    return [(rig.sink.tokens[seq], rig.sink.finished[seq].reason, rig.sink.logprobs[seq]) for seq in seqs]


@functools.cache
def small_truth():
    """Of a small pool, in deterministic mode."""
    with ModelRig("tiny-llama", num_pages=64, num_rows=5, chunk_tokens=24) as rig:
        return traffic(rig)


def same(got, want):
    for (tokens, reason, logprobs), (theirs, their_reason, their_logprobs) in zip(got, want, strict=True):
        assert (tokens, reason) == (theirs, their_reason)
        assert len(logprobs) == len(their_logprobs)
        for mine, other in zip(logprobs, their_logprobs, strict=True):
            assert mine.token == other.token
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [t for t, _ in mine.top] == [t for t, _ in other.top]


@pytest.mark.parametrize("name", ["tiny-llama-f64", "scripted-v41", pytest.param("v41-tiny", marks=pytest.mark.long)])
def test_every_kind_of_request_is_answered_as_on_host_memory(name):
    """Of any model: rows, histories of ids and replay floors reach the forward as they do there."""
    settings = {"num_pages": 120, "num_rows": 5, "chunk_tokens": 160, "page_tokens": 16}
    settings["speculation"] = SpeculationConfig(mode="off")
    with ModelRig(name, **settings) as rig:
        want = traffic(rig)
    with ModelRig(name, on_device=True, **settings) as rig:
        got = traffic(rig)
    same(got, want)
    assert len({tuple(tokens) for tokens, *_ in want}) > 6


@pytest.mark.parametrize("enabled", [True, False])
def test_recorded_steps_choose_what_steps_without_a_recording_choose(enabled, monkeypatch):
    """In deterministic mode, so that padding to a tier cannot show either."""
    replays = []
    real = DecodeGraphs.replay
    monkeypatch.setattr(DecodeGraphs, "replay", lambda self, shape: replays.append(real(self, shape)) or replays[-1])
    model = device_model_of("tiny-llama")
    graphs = GraphsConfig(enabled=enabled, tiers=(2, 3))
    with ModelRig(
        "tiny-llama", model=model, on_device=True, num_pages=64, num_rows=5, chunk_tokens=24, graphs=graphs
    ) as rig:
        same(traffic(rig), small_truth())
    assert len(replays) > 10
    assert all((logits is not None) == enabled for logits in replays)


def test_under_pressure_and_after_a_hand_over_the_text_is_the_same():
    model = device_model_of("tiny-llama-f64")
    request = request_of(prompt_of(1, 61), 16, temperature=0.8, seed=12)
    with ModelRig("tiny-llama-f64", num_rows=1, chunk_tokens=512) as rig:
        seq = rig.engine.submit(request, FAR)
        rig.run()
        want = rig.sink.tokens[seq]
    settings = {"model": model, "on_device": True, "horizon_tokens": 0, "finish_reserve_pages": 0}
    with ModelRig("", **settings, num_pages=22) as rig:
        seq = rig.engine.submit(request, FAR)
        for i in range(2, 4):
            rig.submit(prompt_of(i, 40), 20, temperature=0.0)
        for _ in range(8):
            rig.turn()
        while rig.engine._planner._retract_one(0.0, keep=0):
            pass
        rig.run()
        assert rig.engine.statistics()["retractions"] >= 3
        assert rig.sink.tokens[seq] == want
    with ModelRig("", **settings, chunk_tokens=16) as source, ModelRig("", **settings) as target:
        seq = hand_over(source, target, request)
        target.run()
        assert target.sink.tokens[seq] == want


def warmed(rig):
    """Run the steps before the first request, within the pages of a row."""
    room = min(rig.model.facts.max_positions, rig.engine.capacity.max_pages * rig.config.page_tokens)
    WarmUp(rig.config, rig.model.facts, room).run(rig.runner._executor, lambda: (0, 0))


def test_steps_before_the_first_request_change_no_text():
    """Even if a chunk may have more tokens than the pool."""
    model = device_model_of("tiny-llama")
    with ModelRig("", model=model, on_device=True, num_pages=64, num_rows=5, chunk_tokens=24) as rig:
        warmed(rig)
        same(traffic(rig), small_truth())
    with ModelRig("", model=model, on_device=True, num_pages=4, num_rows=1, chunk_tokens=512) as rig:
        warmed(rig)
        assert len(rig.text(prompt_of(1, 9), 4, temperature=0.0)) == 4


def test_the_models_of_these_tests_are_different_code():
    assert type(device_model_of("tiny-llama")) is not type(model_of("tiny-llama"))
    assert model_of("tiny-llama").device == torch.device("cpu")
