"""DeepSeek-V4.1 (tiny) with replay under the engine, against the dense reference that only applies the floors as masks.

In float64 the engine must say the reference's tokens with its log-probabilities, for any cache, after retractions,
resumes and hand-overs, with and without drafts.
"""

import functools
from dataclasses import replace

import pytest
import torch

from core.request import NO_FLOORS, Floors, with_floors
from engine.cache.hit import ReuseKind, ReuseRule
from engine.config import SpeculationConfig
from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.model import DraftingDeepseekModel
from engine.models.deepseek_v41.replay import COMPACT, MASK, OFF, ReplayRule
from engine.models.deepseek_v41.step import DecoderReplay
from tests.fakes.deepseek_driver import FACTS
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import FAR, ModelRig, hand_over
from tests.fakes.v41_reference import prompt, run, started, tiny, tiny_reference, tiny_weights, token_map

KEEP = 20
RULE = ReuseRule(kind=ReuseKind.REPLAY, replay_tokens=8, align_tokens=2, keep_tokens=KEEP)
OUTPUTS = 7
FIRST = prompt(33)
SECOND = (*FIRST, *prompt(26, seed=1))
THIRD = (*SECOND, *prompt(21, seed=2))
TOLERANCE = 1e-5
"""Log-probabilities come as float32."""

DRAFTING = {"drafted": SpeculationConfig(), "plain": SpeculationConfig(mode="off")}
each_drafting = pytest.mark.parametrize("drafting", DRAFTING)


@functools.cache
def model():
    return DraftingDeepseekModel(
        tiny(),
        tiny_weights(),
        replace(FACTS, reuse=RULE),
        arithmetic_of(tiny()),
        token_map=token_map(),
        replay=DecoderReplay(mode=COMPACT, keep=KEEP),
    )


def rig_of(drafting="plain", **settings):
    return ModelRig("", model=model(), chunk_tokens=24, num_pages=80, speculation=DRAFTING[drafting], **settings)


@functools.cache
@torch.inference_mode()
def truth(ids, outputs, floors):
    """Greedy tokens and their log-probabilities by the reference, hit by hit."""
    reference, tokens, cache = tiny_reference(), list(ids), None
    for held, end in zip((0, *floors.hits), (*floors.hits, len(ids)), strict=True):
        before, cache = cache, started(reference, ids)
        for i in cache.entries if before is not None else ():
            count = held // tiny().layers[i].m
            cache.entries[i].write(0, before.entries[i].read(0, count))
            cache.index_keys[i].write(0, before.index_keys[i].read(0, count))
        floor = max(0, held - 8)
        narrowed = {"mode": MASK, "keep": KEEP, "known_tokens": len(ids)} if floors.decoder_floor else {"mode": OFF}
        rule = ReplayRule(floor=floor, write_from=held, **narrowed)
        result = reference.forward(cache, floor, end, rule)
    logprobs = []
    for _ in range(outputs):
        row = result.logits[-1]
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.log_softmax(-1)[tokens[-1]]))
        cache.extend(tokens[-1:])
        (result,) = run(reference, cache, [1], rule, start=len(tokens) - 1)
    return tokens[len(ids) :], logprobs


def ask(rig, ids, outputs=OUTPUTS, *, floors=None, said=()):
    request = request_of(ids, outputs, outputs=said, temperature=0.0, num_logprobs=0)
    return rig.engine.submit(with_floors(request, floors), FAR)


def answer(rig, ids, outputs=OUTPUTS, **fields):
    seq = ask(rig, ids, outputs, **fields)
    rig.run()
    return seq, rig.sink.started[seq].floors


def assert_true(rig, seq, ids, floors, *, outputs=OUTPUTS, skipped=0):
    tokens, logprobs = truth(tuple(ids), outputs, floors)
    assert rig.sink.tokens[seq][-len(tokens[skipped:]) :] == tokens[skipped:]
    got = [item.logprob for item in rig.sink.logprobs[seq]]
    assert got == pytest.approx(logprobs[-len(got) :], abs=TOLERANCE)


def test_the_reference_tells_floors_apart():
    floors = [
        NO_FLOORS,
        Floors(0, len(THIRD) - KEEP, ()),
        Floors(24, len(THIRD) - KEEP, (32,)),
        Floors(48, len(THIRD) - KEEP, (56,)),
        Floors(48, len(THIRD) - KEEP, (32, 56)),
    ]
    seen = [truth(THIRD, 2, each)[1] for each in floors]
    for i, one in enumerate(seen):
        assert all(max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10 * TOLERANCE for other in seen[:i])


@each_drafting
def test_turns_of_a_conversation_hit_on_hits(drafting):
    with rig_of(drafting) as rig:
        for ids, hits in ((FIRST, ()), (SECOND, (32,)), (THIRD, (32, 56))):
            seq, floors = answer(rig, ids)
            assert floors.hits == hits
            assert floors.decoder_floor == len(ids) - KEEP
            assert_true(rig, seq, ids, floors)


@each_drafting
@pytest.mark.parametrize("flush", [False, True], ids=["cached", "flushed"])
def test_a_retraction_is_replayed_with_the_same_floors(drafting, flush):
    with rig_of(drafting) as rig:
        answer(rig, FIRST, 1)
        answer(rig, SECOND, 1)
        seq = ask(rig, THIRD)
        while len(rig.sink.tokens[seq]) < 3:
            rig.turn()
        assert rig.engine._planner._retract_one(0.0, keep=0)
        if flush:
            rig.engine.flush_cache()
        rig.run()
        floors = rig.sink.started[seq].floors
        assert floors.hits == (32, 56)
        assert_true(rig, seq, THIRD, floors)


@pytest.mark.parametrize("warm", [(), (FIRST,), (THIRD,)])
def test_a_resume_elsewhere_goes_on_with_the_first_attempts_floors(warm):
    floors = Floors(48, len(THIRD) - KEEP, (32, 56))
    said = truth(THIRD, OUTPUTS, floors)[0][:4]
    with rig_of("drafted") as rig:
        for ids in warm:
            answer(rig, ids, 1)
        seq, kept = answer(rig, THIRD, floors=floors, said=said)
        assert kept == floors
        assert_true(rig, seq, THIRD, floors, skipped=4)


@each_drafting
@pytest.mark.parametrize("at_target", [(), (FIRST[:20],), (SECOND,)])
def test_handed_over_is_what_a_single_worker_says(drafting, at_target):
    with rig_of(drafting) as source, rig_of(drafting) as target:
        answer(source, FIRST, 1)
        for ids in at_target:
            answer(target, ids, 1)
        seq = hand_over(source, target, request_of(SECOND, OUTPUTS, temperature=0.0, num_logprobs=0))
        floors = Floors(24, len(SECOND) - KEEP, (32,))
        for _ in range(2):
            target.turn()
        if at_target:
            assert target.engine._planner._retract_one(0.0, keep=0)
        target.run()
        assert_true(target, seq, SECOND, floors)


def test_an_exact_request_is_the_reference_without_replay():
    with rig_of("drafted") as rig:
        answer(rig, FIRST, 1)
        answer(rig, SECOND, 1)
        seq, floors = answer(rig, SECOND, floors=NO_FLOORS)
        assert floors == NO_FLOORS
        assert_true(rig, seq, SECOND, NO_FLOORS)
