"""Random requests with drafts on a real tiny model: batches with every sampling rule equal the plain engine's texts."""

import random

import pytest

from core.request import SamplingParams
from engine.config import SpeculationConfig
from tests.fakes.drafting import DraftingModel
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import FAR, ModelRig, model_of
from tests.property.mutants_executor import MUTANTS

NAME = "tiny-window-f64"
CASES = 5


def sampling(rng):
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.2)),
        seed=rng.randrange(1000),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 20)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 0.6)),
        presence_penalty=rng.choice((0.0, 0.4)),
        num_logprobs=rng.choice((-1, -1, 0, 2)),
    )


def requests_of(rng):
    stems = [[rng.randrange(32, 120) for _ in range(30)] for _ in range(2)]
    made = []
    for _ in range(5):
        prompt = rng.choice(stems)[: rng.randint(1, 30)] + [rng.randrange(32, 120) for _ in range(rng.randrange(4))]
        stops = tuple(rng.sample(range(97, 120), 2)) if rng.random() < 0.5 else ()
        base = request_of(prompt, rng.randint(1, 20), stop_token_ids=stops, min_tokens=rng.choice((0, 4)))
        fields = {f: getattr(base, f) for f in base.__struct_fields__ if f != "sampling"}
        made.append(type(base)(**fields, sampling=sampling(rng)))
    return made


def texts(requests, model=None, **settings):
    with ModelRig(NAME, model=model, page_tokens=4, num_pages=120, num_rows=3, chunk_tokens=16, **settings) as rig:
        seqs = []
        for request in requests:
            seqs.append(rig.engine.submit(request, FAR))
            rig.turn()
        rig.run()
        sink = rig.sink
        said = [[(item.token, round(item.logprob, 4)) for item in sink.logprobs[seq]] for seq in seqs]
        return [(sink.tokens[seq], sink.finished[seq].reason) for seq in seqs], said


def play(seed):
    rng = random.Random(seed)
    requests = requests_of(rng)
    wanted = texts(requests, speculation=SpeculationConfig(mode="off"))
    known = [[*request.token_ids, *tokens] for request, (tokens, _) in zip(requests, wanted[0], strict=True)]
    share = rng.choice((0.4, 0.8, 1.0))
    model = DraftingModel(
        model_of(NAME), known, lambda: rng.random() < share, num_drafts=rng.choice((1, 3, 5)), logits=rng.random() < 0.5
    )
    mode = rng.choice(("static", "confidence"))
    assert texts(requests, model, speculation=SpeculationConfig(mode=mode)) == wanted


@pytest.mark.parametrize("seed", range(CASES))
def test_every_text_is_the_plain_one(seed):
    play(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_planted_fault_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(8):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{mutant.__name__} went unnoticed")
