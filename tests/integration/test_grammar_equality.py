"""Structured output has one truth too: a text that fits its grammar, and the same one however it is computed.

Plain or with drafts of any quality, alone or in a batch, in chunks, handed over, resumed at any token, retracted.
"""

import json
import random

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from core.request import FinishReason, SamplingParams
from engine.config import SpeculationConfig
from tests.fakes.drafting import DraftingModel
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import FAR, ModelRig, hand_over, model_of

MODEL = "tiny-llama-f64"
EOS = 258
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SPACE = {"whitespace_pattern": r"[ ]{0,1}"}
GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(SCHEMA, overrides=SPACE),
    "regex": LLMatcher.grammar_from_regex(r"[a-c]{3,9}-[0-9]{2}"),
    "reasoning": "start: thought /(yes|no){1,4}!/\nthought[lazy]: /(.|\\n)*q/",
}
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "seeded": SamplingParams(temperature=1.0, seed=77)}
LIMIT = 120


def prompt_of(seed, length=37):
    rng = random.Random(seed)
    return [rng.randrange(97, 120) for _ in range(length)]


PROMPT = prompt_of(3)


def ask(grammar, sampling, *, prompt=PROMPT, limit=LIMIT, **fields):
    base = request_of(prompt, limit, ignore_eos=False, grammar=grammar, **fields)
    return type(base)(**{f: getattr(base, f) for f in base.__struct_fields__ if f != "sampling"}, sampling=sampling)


def run(rig, request):
    seq = rig.engine.submit(request, FAR)
    rig.run()
    return rig.sink.tokens[seq], rig.sink.finished[seq].reason


def text_of(tokens):
    assert tokens[-1] == EOS
    return bytes(tokens[:-1]).decode(errors="replace")


@pytest.fixture(scope="module")
def plain():
    known = {}

    def text(grammar, sampling, prompt=None):
        key = (grammar, sampling, prompt)
        if key not in known:
            with ModelRig(MODEL) as rig:
                request = ask(GRAMMARS[grammar], SAMPLINGS[sampling], prompt=prompt_of(prompt or 3))
                known[key] = run(rig, request)
        return known[key]

    return text


CASES = [(grammar, sampling) for grammar in GRAMMARS for sampling in SAMPLINGS]


@pytest.mark.parametrize(("grammar", "sampling"), CASES)
def test_a_text_fits_its_grammar_and_ends_by_itself(plain, grammar, sampling):
    tokens, reason = plain(grammar, sampling)
    assert reason is FinishReason.STOP
    text = text_of(tokens)
    match grammar:
        case "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "regex":
            assert text[:-3].strip("abc") == "" and text[-3] == "-" and text[-2:].isdigit()
        case "reasoning":
            _thought, _, answer = text.partition("q")
            assert answer.endswith("!") and answer[:-1].replace("yes", "").replace("no", "") == "" and answer != "!"


def test_without_its_grammar_the_same_request_says_something_else():
    with ModelRig(MODEL) as rig:
        tokens, _ = run(rig, ask("", SAMPLINGS["greedy"]))
    with pytest.raises(ValueError):
        json.loads(bytes(t for t in tokens if t < 256))


@pytest.mark.parametrize(("grammar", "sampling"), CASES)
@pytest.mark.parametrize(("share", "logits"), [(0.0, False), (0.6, True), (1.0, False)])
def test_drafts_of_any_quality_change_nothing(plain, grammar, sampling, share, logits):
    truth = plain(grammar, sampling)
    rng = random.Random(9)
    model = DraftingModel(model_of(MODEL), [PROMPT + truth[0]], lambda: rng.random() < share, logits=logits)
    with ModelRig(MODEL, model=model, speculation=SpeculationConfig(mode="static")) as rig:
        assert run(rig, ask(GRAMMARS[grammar], SAMPLINGS[sampling])) == truth
        if share == 1.0 and grammar == "schema":
            assert rig.engine.statistics()["drafts_accepted"] > len(truth[0]) // 2


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_a_batch_of_different_grammars_in_chunks_says_the_same(plain, drafts):
    prompts = [11, 12]
    truths = {(g, s, p): plain(g, s, p) for g, s in CASES for p in prompts}
    fields = {"num_pages": 24, "chunk_tokens": 16}
    if drafts:
        texts = [prompt_of(p) + truth[0] for (_, _, p), truth in truths.items()]
        rng = random.Random(4)
        fields |= {"model": DraftingModel(model_of(MODEL), texts, lambda: rng.random() < 0.7), "num_pages": 24}
    with ModelRig(MODEL, **fields) as rig:
        asked = {
            key: rig.engine.submit(ask(GRAMMARS[key[0]], SAMPLINGS[key[1]], prompt=prompt_of(key[2])), FAR)
            for key in truths
        }
        rig.run()
        assert rig.engine.statistics()["retractions"] > 0
        for key, seq in asked.items():
            assert (rig.sink.tokens[seq], rig.sink.finished[seq].reason) == truths[key], key


@pytest.mark.parametrize(("grammar", "sampling"), CASES)
def test_a_hand_over_says_the_same(plain, grammar, sampling):
    with ModelRig(MODEL) as source, ModelRig(MODEL) as target:
        seq = hand_over(source, target, ask(GRAMMARS[grammar], SAMPLINGS[sampling]))
        target.run()
        assert (target.sink.tokens[seq], target.sink.finished[seq].reason) == plain(grammar, sampling)


@pytest.mark.parametrize(("grammar", "sampling"), CASES)
def test_a_resumed_request_goes_on_where_it_was_cut(plain, grammar, sampling):
    truth, reason = plain(grammar, sampling)
    with ModelRig(MODEL) as rig:
        for cut in {1, 2, len(truth) // 2, len(truth) - 1}:
            request = ask(GRAMMARS[grammar], SAMPLINGS[sampling], outputs=truth[:cut])
            seq = rig.engine.submit(request, FAR)
            rig.run()
            assert (rig.sink.tokens[seq], rig.sink.finished[seq].reason) == (truth[cut:], reason), cut


def test_min_tokens_never_breaks_a_grammar_that_is_complete():
    with ModelRig(MODEL) as rig:
        tokens, _ = run(rig, ask(GRAMMARS["regex"], SAMPLINGS["greedy"], min_tokens=60))
    text = text_of(tokens[: tokens.index(EOS) + 1])
    assert text[-2:].isdigit() and set(tokens[len(text) :]) == {EOS}


def test_a_grammar_that_outgrows_its_budget_ends_its_own_request_only(plain):
    # Compiles, but a mask of it needs more items than the budget of a step.
    text = 'start: "a" x\n' + "x: " + " | ".join(f'y{i} "b" x' for i in range(2500)) + ' | "c"\n'
    text += "\n".join(f'y{i}: "a"' for i in range(2500)) + "\n"
    with ModelRig(MODEL) as rig:
        bad = rig.engine.submit(ask(text, SAMPLINGS["greedy"]), FAR)
        good = rig.engine.submit(ask(GRAMMARS["schema"], SAMPLINGS["greedy"]), FAR)
        rig.run()
        assert rig.sink.failed[bad].error.code == "invalid_request"
        assert rig.sink.tokens[good] == plain("schema", "greedy")[0]
        assert rig.grammars.statistics()["grammar_failed"] == 1


SCALARS = st.one_of(
    st.fixed_dictionaries({"type": st.just("integer"), "minimum": st.integers(-5, 5), "maximum": st.integers(6, 40)}),
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(0, 5)}),
    st.fixed_dictionaries(
        {"enum": st.lists(st.sampled_from(["a", 1, None, True, "é", 'x"y']), min_size=1, unique_by=repr)}
    ),
    st.just({"type": "boolean"}),
    st.just({"type": ["null", "boolean"]}),
)


def objects(inner):
    def build(fields):
        names = [f"k{i}" for i in range(len(fields))]
        return {
            "type": "object",
            "properties": dict(zip(names, fields, strict=True)),
            "required": names[::2],
            "additionalProperties": False,
        }

    arrays = inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2})
    return st.one_of(
        st.lists(inner, max_size=3).map(build),
        arrays,
        st.lists(inner, min_size=1, max_size=2).map(lambda x: {"anyOf": x}),
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=st.recursive(SCALARS, objects, max_leaves=5), seed=st.integers(0, 2**32))
def test_every_schema_is_followed(schema, seed):
    with ModelRig(MODEL) as rig:
        text = LLMatcher.grammar_from_json_schema(schema, overrides=SPACE)
        tokens, reason = run(rig, ask(text, SamplingParams(temperature=1.5, seed=seed), limit=300))
    if reason is FinishReason.STOP:
        jsonschema.validate(json.loads(text_of(tokens)), schema)
