"""One engine, one truth: the same tokens whatever the chunking, batch, cache, pressure or place of the prefill.

On tiny models in float64, where different shapes cannot change a choice, and in float32 with the deterministic mode,
where they must not change a bit. `tiny-window` keeps a sliding window in a per-row ring (seam c).
"""

import random

import pytest

from core.request import FinishReason
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import ModelRig, hand_over

MODELS = ("tiny-llama-f64", "tiny-window-f64", "scripted")
OUTPUTS = 16


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(32, 120) for _ in range(length)]


PROMPT = prompt_of(1, 61)
SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 1234}}


@pytest.fixture(scope="module")
def truth():
    """Alone, in one chunk, with nothing cached."""
    known = {}

    def compute(name, sampling, prompt=tuple(PROMPT), outputs=OUTPUTS):
        key = (name, sampling, tuple(prompt), outputs)
        if key not in known:
            with ModelRig(name, chunk_tokens=512, num_rows=1) as rig:
                known[key] = rig.text(prompt, outputs, **SAMPLINGS[sampling])
            assert len(set(known[key])) > 3, "a text without variety proves nothing"
        return known[key]

    return compute


each_model = pytest.mark.parametrize("name", MODELS)
each_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)


@each_model
@each_sampling
@pytest.mark.parametrize("chunk", [8, 24])
def test_chunked_equals_one_shot(name, sampling, chunk, truth):
    with ModelRig(name, chunk_tokens=chunk) as rig:
        assert rig.text(PROMPT, OUTPUTS, **SAMPLINGS[sampling]) == truth(name, sampling)


@each_model
@each_sampling
def test_batched_with_others_equals_alone(name, sampling, truth):
    with ModelRig(name, num_pages=200) as rig:
        others = [rig.submit(prompt_of(i, 5 + 9 * i), 30, temperature=1.0, seed=i) for i in range(2, 6)]
        for _ in range(3):
            rig.turn()
        seq = rig.submit(PROMPT, OUTPUTS, **SAMPLINGS[sampling])
        rig.run()
        assert rig.sink.tokens[seq] == truth(name, sampling)
        assert len(rig.sink.finished) == len(others) + 1


@each_model
@each_sampling
def test_after_a_prefix_hit_equals_computed(name, sampling, truth):
    with ModelRig(name) as rig:
        rig.text(PROMPT[:40] + prompt_of(9, 4), 2, temperature=0.0)
        seq = rig.submit(PROMPT, OUTPUTS, **SAMPLINGS[sampling])
        rig.run()
        assert rig.sink.tokens[seq] == truth(name, sampling)
        cached = rig.sink.started[seq].num_cached_tokens
        assert cached == (0 if rig.layout.has_row_state else 40)


@each_model
@pytest.mark.parametrize("sampling", ["seeded"])
def test_after_retraction_equals_undisturbed(name, sampling, truth):
    with ModelRig(name, num_pages=22, horizon_tokens=0, finish_reserve_pages=0) as rig:
        seqs = [rig.submit(PROMPT, OUTPUTS, **SAMPLINGS[sampling])]
        prompts = [prompt_of(i, 40) for i in range(2, 4)]
        seqs += [rig.submit(prompt, 20, temperature=0.0) for prompt in prompts]
        for _ in range(8):
            rig.turn()
        while rig.engine._planner._retract_one(0.0, keep=0):
            pass
        rig.run()
        assert rig.engine.statistics()["retractions"] >= 3
        assert rig.sink.tokens[seqs[0]] == truth(name, sampling)
        for seq, prompt in zip(seqs[1:], prompts, strict=True):
            assert rig.sink.tokens[seq] == truth(name, "greedy", prompt, 20)


@each_model
@each_sampling
@pytest.mark.parametrize("chunk", [16, 512])
def test_handed_over_equals_local(name, sampling, chunk, truth):
    with ModelRig(name, chunk_tokens=chunk) as source, ModelRig(name, num_pages=40) as target:
        # The rows differ on purpose: a ring must travel to the destination's own.
        source.submit(prompt_of(7, 12), 60, temperature=0.0)
        source.turn()
        target.submit(prompt_of(8, 20), 60, temperature=0.0)
        target.turn()
        seq = hand_over(source, target, request_of(PROMPT, OUTPUTS, **SAMPLINGS[sampling]))
        target.run()
        assert target.sink.tokens[seq] == truth(name, sampling)
        assert target.sink.finished[seq].recomputed_tokens == 0


@each_model
def test_handed_over_onto_a_cached_prefix_equals_local(name, truth):
    with ModelRig(name) as source, ModelRig(name) as target:
        target.text(PROMPT[:30], 1, temperature=0.0)
        seq = hand_over(source, target, request_of(PROMPT, OUTPUTS, **SAMPLINGS["seeded"]))
        target.run()
        assert target.sink.tokens[seq] == truth(name, "seeded")


@each_model
def test_retracted_after_a_hand_over_equals_local(name, truth):
    with ModelRig(name) as source, ModelRig(name) as target:
        seq = hand_over(source, target, request_of(PROMPT, OUTPUTS, **SAMPLINGS["seeded"]))
        for _ in range(6):
            target.turn()
        assert target.engine._planner._retract_one(0.0, keep=0)
        target.run()
        assert target.sink.tokens[seq] == truth(name, "seeded")
        assert target.sink.finished[seq].recomputed_tokens > 0


@each_model
@pytest.mark.parametrize("sampling", ["seeded"])
def test_resumed_elsewhere_equals_undisturbed(name, sampling, truth):
    wanted = truth(name, sampling)
    with ModelRig(name) as rig:
        got = rig.text(PROMPT, OUTPUTS, outputs=wanted[:11], **SAMPLINGS[sampling])
        assert wanted[:11] + got == wanted
    with ModelRig(name) as source, ModelRig(name) as target:
        request = request_of(PROMPT, OUTPUTS, outputs=wanted[:11], **SAMPLINGS[sampling])
        seq = hand_over(source, target, request)
        target.run()
        assert wanted[:11] + target.sink.tokens[seq] == wanted


def test_penalties_and_logprobs_survive_a_hand_over_and_a_retraction():
    fields = {"temperature": 0.7, "seed": 5, "num_logprobs": 2}

    def request(outputs=()):
        base = request_of(PROMPT, OUTPUTS, outputs=outputs, **fields)
        changed = type(base.sampling)(
            temperature=0.7,
            seed=5,
            num_logprobs=2,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={70: 1.5},
        )
        return type(base)(**{f: getattr(base, f) for f in base.__struct_fields__ if f != "sampling"}, sampling=changed)

    name = "tiny-llama-f64"
    with ModelRig(name) as rig:
        seq = rig.engine.submit(request(), 1e9)
        rig.run()
        wanted, logprobs = rig.sink.tokens[seq], rig.sink.logprobs[seq]
        plain = rig.text(PROMPT, OUTPUTS, temperature=0.7, seed=5)
    assert wanted != plain
    assert [item.token for item in logprobs] == wanted
    with ModelRig(name) as source, ModelRig(name) as target:
        seq = hand_over(source, target, request())
        for _ in range(5):
            target.turn()
        assert target.engine._planner._retract_one(0.0, keep=0)
        target.run()
        assert target.sink.tokens[seq] == wanted
        for mine, theirs in zip(target.sink.logprobs[seq], logprobs[1:], strict=True):
            assert mine.token == theirs.token
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-6)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-window"])
def test_in_float32_the_deterministic_mode_gives_the_same_bits_in_any_batch_and_chunking(name):
    seen = []
    for chunk, company in ((512, 0), (8, 0), (24, 5), (64, 2)):
        with ModelRig(name, num_pages=200, chunk_tokens=chunk, deterministic=True) as rig:
            for i in range(company):
                rig.submit(prompt_of(20 + i, 11 * i + 3), 40, temperature=1.0, seed=i)
            rig.turn()
            seq = rig.submit(PROMPT, OUTPUTS, temperature=0.9, seed=77, num_logprobs=1)
            rig.run()
            seen.append((rig.sink.tokens[seq], rig.sink.logprobs[seq]))
    assert all(one == seen[0] for one in seen[1:])


def test_stop_tokens_and_minimum_lengths_are_obeyed_by_a_real_model(truth):
    wanted = truth("tiny-llama-f64", "greedy")
    stop = wanted[6]
    first = wanted.index(stop)
    with ModelRig("tiny-llama-f64") as rig:
        seq = rig.submit(PROMPT, OUTPUTS, temperature=0.0, stop_token_ids=(stop,))
        rig.run()
        assert rig.sink.tokens[seq] == wanted[: first + 1]
        assert rig.sink.finished[seq].reason is FinishReason.STOP
        seq = rig.submit(PROMPT, OUTPUTS, temperature=0.0, stop_token_ids=(stop,), min_tokens=first + 3)
        rig.run()
        assert stop not in rig.sink.tokens[seq][: first + 3]
        assert len(rig.sink.tokens[seq]) > first + 1
