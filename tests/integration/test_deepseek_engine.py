"""DeepSeek-V4.1 under the engine: the same tokens whatever the chunking, batch, drafts, pressure or place of the prefill.

Exact mode in float32 must not change a bit. Replay mode is an approximation by design: there a text is equal if it was
computed with the same floors, and `mask`, which computes everything, is the oracle of `replay`.
"""

import random

import pytest

from engine.config import SpeculationConfig
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import ModelRig, hand_over

EXACT, REPLAY, MASK = "v41-tiny:f32:exact", "v41-tiny:f32:replay", "v41-tiny:f32:mask"
OUTPUTS = 9
PLAIN = {"speculation": SpeculationConfig(mode="off")}
SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 1234}}


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(32, 120) for _ in range(length)]


PROMPT = prompt_of(1, 45)


@pytest.fixture(scope="module")
def truth():
    """Alone, in one chunk, without drafts and with nothing cached."""
    known = {}

    def compute(name, sampling, prompt=tuple(PROMPT), outputs=OUTPUTS):
        key = (name, sampling, tuple(prompt), outputs)
        if key not in known:
            with ModelRig(name, chunk_tokens=512, num_rows=1, **PLAIN) as rig:
                known[key] = rig.text(prompt, outputs, **SAMPLINGS[sampling])
            assert len(set(known[key])) > 3, "a text without variety proves nothing"
        return known[key]

    return compute


each_mode = pytest.mark.parametrize("name", [EXACT, REPLAY])


@each_mode
@pytest.mark.parametrize(("drafting", "sampling"), [({}, "seeded"), (PLAIN, "seeded"), ({}, "greedy")])
def test_chunked_and_drafted_equals_one_shot_and_plain(name, drafting, sampling, truth):
    with ModelRig(name, chunk_tokens=16, **drafting) as rig:
        assert rig.text(PROMPT, OUTPUTS, **SAMPLINGS[sampling]) == truth(name, sampling)


def test_the_masked_oracle_gives_the_tokens_of_replay(truth):
    assert truth(MASK, "seeded") == truth(REPLAY, "seeded")


@each_mode
def test_batched_with_others_equals_alone(name, truth):
    with ModelRig(name, num_pages=200) as rig:
        others = [rig.submit(prompt_of(i, 5 + 9 * i), 6, temperature=1.0, seed=i) for i in range(2, 6)]
        for _ in range(2):
            rig.turn()
        seq = rig.submit(PROMPT, OUTPUTS, **SAMPLINGS["seeded"])
        rig.run()
        assert rig.sink.tokens[seq] == truth(name, "seeded")
        assert len(rig.sink.finished) == len(others) + 1


@pytest.mark.parametrize(("name", "drafting"), [(EXACT, {}), (REPLAY, {}), (REPLAY, PLAIN)])
def test_after_retraction_equals_undisturbed(name, drafting, truth):
    with ModelRig(name, num_pages=20, horizon_tokens=0, finish_reserve_pages=0, **drafting) as rig:
        seq = rig.submit(PROMPT, OUTPUTS, **SAMPLINGS["seeded"])
        other = rig.submit(prompt_of(2, 40), OUTPUTS, temperature=0.0)
        for _ in range(5):
            rig.turn()
        while rig.engine._planner._retract_one(0.0, keep=0):
            pass
        rig.run()
        assert rig.engine.statistics()["retractions"] >= 2
        assert rig.sink.tokens[seq] == truth(name, "seeded")
        assert rig.sink.tokens[other] == truth(name, "greedy", tuple(prompt_of(2, 40)))


@pytest.mark.parametrize(("name", "length"), [(EXACT, 45), (EXACT, 5), (REPLAY, 45), (REPLAY, 44)])
def test_handed_over_equals_local(name, length, truth):
    prompt = PROMPT[:length]
    with ModelRig(name, chunk_tokens=16) as source, ModelRig(name, num_pages=40) as target:
        # The rows differ on purpose: rings must travel to the destination's own.
        source.submit(prompt_of(7, 12), 6, temperature=0.0)
        source.turn()
        target.submit(prompt_of(8, 20), 6, temperature=0.0)
        target.turn()
        seq = hand_over(source, target, request_of(prompt, OUTPUTS, **SAMPLINGS["seeded"]))
        target.run()
        assert target.sink.tokens[seq] == truth(name, "seeded", tuple(prompt))
        assert target.sink.finished[seq].recomputed_tokens == 0


def test_a_hit_costs_the_rows_behind_it_and_the_replayed_ones():
    with ModelRig(REPLAY, chunk_tokens=512, **PLAIN) as rig:
        rig.text(PROMPT, 1, temperature=0.0)
        before = list(rig.model.executed_rows)
        rig.text([*PROMPT[:40], *prompt_of(3, 30)], 1, temperature=0.0)
        done = [after - at for after, at in zip(rig.model.executed_rows, before, strict=True)]
        # 40 cached tokens, of which 8 are replayed; the last 20 of 70 run through the decoder.
        assert done == [70 - 40 + 8] * 8 + [20] * 6


def test_exact_mode_reuses_no_pages():
    with ModelRig(EXACT, **PLAIN) as rig:
        first = rig.text(PROMPT, 6, temperature=0.0)
        seq = rig.submit(PROMPT, 6, temperature=0.0)
        rig.run()
        assert rig.sink.tokens[seq] == first
        assert rig.sink.started[seq].num_cached_tokens == 0
