"""With drafts or without, one truth (decisions A14, A20): the same tokens for any pattern of acceptance.

An oracle beside tiny models proposes drafts of which a scripted share is right; the plain engine says what must come
out. Chunked, batched, retracted, handed over, resumed; with penalties, log-probabilities, stops inside a run.
"""

import random

import pytest

from core.request import FinishReason, SamplingParams
from engine.config import SpeculationConfig
from tests.fakes.drafting import DraftingModel
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import FAR, ModelRig, hand_over, model_of

MODELS = ("tiny-llama-f64", "tiny-window-f64", "scripted")
OUTPUTS = 23
SHARES = (0.0, 0.6, 1.0)


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(32, 120) for _ in range(length)]


PROMPT = prompt_of(1, 45)
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.8, seed=1234),
    "all": SamplingParams(
        temperature=0.9,
        seed=5,
        top_p=0.95,
        num_logprobs=2,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={70: 1.5},
    ),
}


def ask(prompt, max_tokens, sampling, **fields):
    base = request_of(prompt, max_tokens, **fields)
    return type(base)(**{f: getattr(base, f) for f in base.__struct_fields__ if f != "sampling"}, sampling=sampling)


def run(rig, request):
    seq = rig.engine.submit(request, FAR)
    rig.run()
    return rig.sink.tokens[seq], rig.sink.logprobs[seq], rig.sink.finished[seq].reason


@pytest.fixture(scope="module")
def plain():
    """What the engine says without drafts: tokens, log-probabilities, reason."""
    known = {}

    def compute(name, request):
        key = (name, repr(request))
        if key not in known:
            with ModelRig(name, chunk_tokens=512, num_rows=1) as rig:
                known[key] = run(rig, request)
        return known[key]

    return compute


def drafting(name, texts, share, seed=0, **settings):
    rng = random.Random(seed)
    return DraftingModel(model_of(name), texts, lambda: rng.random() < share, **settings)


def assert_same(got, wanted):
    assert got[0] == wanted[0]
    assert got[2] == wanted[2]
    assert [item.token for item in got[1]] == [item.token for item in wanted[1]]
    for mine, theirs in zip(got[1], wanted[1], strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-6)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


each_model = pytest.mark.parametrize("name", MODELS)
each_share = pytest.mark.parametrize("share", SHARES)


@each_model
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("share", "num_drafts"), [(0.0, 5), (0.6, 1), (0.6, 5), (1.0, 5)])
def test_alone_and_in_chunks(name, sampling, share, num_drafts, plain):
    request = ask(PROMPT, OUTPUTS, SAMPLINGS[sampling])
    wanted = plain(name, request)
    model = drafting(name, [PROMPT + wanted[0]], share, num_drafts=num_drafts)
    with ModelRig(name, model=model, chunk_tokens=16) as rig:
        assert_same(run(rig, request), wanted)
        stats = rig.engine.statistics()
        assert stats["drafts_verified"] > 0
        if share == 1.0:
            assert stats["drafts_accepted"] == stats["drafts_verified"]
            assert stats["steps"] <= 4 + -(-OUTPUTS // (1 + num_drafts)), "right drafts must save steps"
        elif share == 0.0:
            assert stats["drafts_accepted"] < stats["drafts_verified"] / 4


@each_model
@pytest.mark.parametrize("mode", ["static", "confidence"])
@pytest.mark.parametrize("logits", [False, True])
def test_batched_with_others_that_come_and_go(name, mode, logits, plain):
    requests = [ask(prompt_of(i, 5 + 9 * i), 9 + 5 * i, list(SAMPLINGS.values())[i % 3]) for i in range(5)]
    wanted = [plain(name, request) for request in requests]
    texts = [[*request.token_ids, *tokens] for request, (tokens, *_) in zip(requests, wanted, strict=True)]
    model = drafting(name, texts, 0.7, logits=logits)
    with ModelRig(name, model=model, num_pages=200, num_rows=3, speculation=SpeculationConfig(mode=mode)) as rig:
        seqs = []
        for request in requests:
            seqs.append(rig.engine.submit(request, FAR))
            rig.turn()
        rig.run()
        for seq, one in zip(seqs, wanted, strict=True):
            assert_same((rig.sink.tokens[seq], rig.sink.logprobs[seq], rig.sink.finished[seq].reason), one)
        stats = rig.engine.statistics()
        # How many drafts pay for their time depends on the machine.
        assert mode == "confidence" or 0 < stats["drafts_accepted"] < stats["drafts_verified"]


@each_model
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_retracted_and_handed_over_and_resumed(name, share, plain):
    request = ask(PROMPT, OUTPUTS, SAMPLINGS["all"])
    wanted = plain(name, request)
    model = drafting(name, [PROMPT + wanted[0]], share)
    with ModelRig(name, model=model) as source, ModelRig(name, model=model) as target:
        seq = hand_over(source, target, request)
        for _ in range(3):
            target.turn()
        assert target.engine._planner._retract_one(0.0, keep=0)
        target.run()
        # The first token and its log-probabilities came from the source.
        assert target.sink.tokens[seq] == wanted[0]
        assert [item.token for item in target.sink.logprobs[seq]] == wanted[0][1:]
        assert target.engine.statistics()["retractions"] == 1
        for done in (1, 4, 11):
            resumed = ask(PROMPT, OUTPUTS, SAMPLINGS["all"], outputs=wanted[0][:done])
            got = run(target, resumed)
            assert wanted[0][:done] + got[0] == wanted[0]


@each_model
@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_stop_token_inside_a_run_of_accepted_drafts_ends_it_there(name, place, plain):
    text = plain(name, ask(PROMPT, OUTPUTS, GREEDY))[0]
    stop = text[place]
    request = ask(PROMPT, OUTPUTS, GREEDY, stop_token_ids=(stop,), min_tokens=0)
    wanted = plain(name, request)
    assert wanted[0][-1] == stop and wanted[2] is FinishReason.STOP
    with ModelRig(name, model=drafting(name, [PROMPT + text], 1.0)) as rig:
        assert_same(run(rig, request), wanted)
        assert rig.engine.statistics()["sequences"] == 0
        # What was cached of it is what a plain run leaves: the next request sees the same.
        again = ask([*PROMPT, *wanted[0]], 6, GREEDY)
        assert run(rig, again)[0] == plain(name, again)[0]


@each_model
@each_share
def test_stop_tokens_are_masked_up_to_the_minimum_length(name, share, plain):
    text = plain(name, ask(PROMPT, OUTPUTS, GREEDY))[0]
    request = ask(PROMPT, OUTPUTS, GREEDY, stop_token_ids=(text[2],), min_tokens=7, ignore_eos=False)
    wanted = plain(name, request)
    with ModelRig(name, model=drafting(name, [PROMPT + wanted[0], PROMPT + text], share)) as rig:
        assert_same(run(rig, request), wanted)


@each_model
@pytest.mark.parametrize("outputs", [1, 2, 6, 7])
def test_any_number_of_outputs(name, outputs, plain):
    request = ask(PROMPT, outputs, GREEDY)
    longer = plain(name, ask(PROMPT, OUTPUTS, GREEDY))[0]
    with ModelRig(name, model=drafting(name, [PROMPT + longer], 1.0)) as rig:
        got = run(rig, request)
        assert got[0] == longer[:outputs]
        assert got[2] is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-window"])
def test_in_float32_the_deterministic_mode_gives_the_same_bits(name, plain):
    request = ask(PROMPT, OUTPUTS, SamplingParams(temperature=0.9, seed=77, num_logprobs=1))
    wanted = plain(name, request)
    for share in SHARES:
        model = drafting(name, [PROMPT + wanted[0]], share)
        with ModelRig(name, model=model, num_pages=200, chunk_tokens=24, deterministic=True) as rig:
            rig.submit(prompt_of(3, 30), 40, temperature=1.0, seed=3)
            rig.turn()
            seq = rig.engine.submit(request, FAR)
            rig.run()
            assert (rig.sink.tokens[seq], rig.sink.logprobs[seq]) == (wanted[0], wanted[1])


def test_the_chain_rule_is_greedy_where_plain_is_and_repeatable_where_it_draws(plain):
    name, rule = "tiny-llama-f64", SpeculationConfig(acceptance="chain_rule")
    wanted = plain(name, ask(PROMPT, OUTPUTS, GREEDY))
    texts = [PROMPT + wanted[0]]
    with ModelRig(name, model=drafting(name, texts, 0.7), speculation=rule) as rig:
        assert_same(run(rig, ask(PROMPT, OUTPUTS, GREEDY)), wanted)
    drawn = []
    for _ in range(2):
        with ModelRig(name, model=drafting(name, texts, 0.7, logits=True), speculation=rule) as rig:
            drawn.append(run(rig, ask(PROMPT, OUTPUTS, SAMPLINGS["all"])))
            assert 0 < rig.engine.statistics()["drafts_accepted"] < rig.engine.statistics()["drafts_verified"]
    assert_same(drawn[0], drawn[1])
    assert [item.token for item in drawn[0][1]] == drawn[0][0]


def test_speculation_that_is_off_or_has_no_drafter_runs_the_plain_path(plain):
    request = ask(PROMPT, OUTPUTS, GREEDY)
    name = "tiny-llama-f64"
    with ModelRig(name, model=drafting(name, [], 1.0), speculation=SpeculationConfig(mode="off")) as rig:
        assert_same(run(rig, request), plain(name, request))
        statistics = rig.engine.statistics()
        assert (statistics["drafts_verified"], statistics["drafts_accepted"]) == (0, 0)
        assert "drafts_accepted_at_0" not in statistics, "an engine that keeps counts by place does speculate"
