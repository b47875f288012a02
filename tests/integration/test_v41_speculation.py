"""DeepSeek-V4.1 (tiny) with its own draft model and with an oracle: the tokens of a plain run, wherever it runs.

Rejected rows of every kind of its state (window rings, compressor rows, compressed entries, n-gram history, draft
context) must leave no trace. Random weights accept few of their own drafts; the oracle's are accepted in plenty.
"""

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch

from engine.config import SpeculationConfig
from engine.models.builtin import prepare_builtin
from engine.models.registry import load_model
from tests.fakes.drafting import DraftingModel
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import FAR, ModelRig, hand_over

OUTPUTS = 10
OFF = SpeculationConfig(mode="off")
SAMPLING = {"temperature": 0.8, "seed": 21}


@functools.cache
def folder():
    torch.set_num_threads(1)
    return prepare_builtin("v41-tiny", Path(tempfile.mkdtemp(prefix="tandem-v41-")))


@functools.cache
def v41(mode):
    return load_model(folder(), mode=mode)


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(32, 120) for _ in range(length)]


def rig_of(model, **settings):
    return ModelRig("v41-tiny", model=model, **{"page_tokens": 16, "chunk_tokens": 64, **settings})


@functools.cache
def plain(mode, prompt, outputs=OUTPUTS):
    with rig_of(v41(mode), speculation=OFF) as rig:
        return rig.text(list(prompt), outputs, **SAMPLING)


def oracle(mode, prompt, share, outputs=OUTPUTS, num_drafts=5):
    rng = random.Random(4)
    texts = [[*prompt, *plain(mode, tuple(prompt), outputs)]]
    return DraftingModel(v41(mode), texts, lambda: rng.random() < share, num_drafts=num_drafts)


@pytest.mark.parametrize("mode", ["exact", None])
def test_its_own_drafts_change_nothing(mode):
    prompt = prompt_of(1, 37)
    with rig_of(v41(mode)) as rig:
        assert rig.text(prompt, OUTPUTS, **SAMPLING) == plain(mode, tuple(prompt))
        assert rig.engine.statistics()["drafts_verified"] > OUTPUTS


@pytest.mark.parametrize(("length", "share"), [(36, 0.6), (37, 0.6), (37, 1.0)])
def test_accepted_and_rejected_drafts_leave_the_state_of_a_plain_run(length, share):
    prompt = prompt_of(2, length)
    with rig_of(oracle("exact", prompt, share), chunk_tokens=16) as rig:
        assert rig.text(prompt, OUTPUTS, **SAMPLING) == plain("exact", tuple(prompt))
        assert rig.engine.statistics()["drafts_accepted"] > OUTPUTS // 3


@pytest.mark.parametrize(("mode", "length"), [("exact", 33), (None, 36)])
def test_handed_over_into_a_batch(mode, length):
    prompt = prompt_of(3, length)
    model = oracle(mode, prompt, 0.7)
    with rig_of(model) as source, rig_of(model) as target:
        target.submit(prompt_of(8, 20), 8, temperature=0.0)
        target.turn()
        seq = hand_over(source, target, request_of(prompt, OUTPUTS, **SAMPLING))
        target.run()
        assert target.sink.tokens[seq] == plain(mode, tuple(prompt))
        assert target.engine.statistics()["drafts_accepted"] > 1


def test_retracted_in_the_middle_of_a_run_and_resumed_elsewhere():
    prompt = prompt_of(5, 35)
    wanted = plain("exact", tuple(prompt))
    with rig_of(oracle("exact", prompt, 0.7)) as rig:
        seq = rig.engine.submit(request_of(prompt, OUTPUTS, **SAMPLING), FAR)
        for _ in range(3):
            rig.turn()
        assert rig.engine._planner._retract_one(0.0, keep=0)
        rig.run()
        assert rig.sink.tokens[seq] == wanted
        assert rig.engine.statistics()["retractions"] == 1
        assert wanted[:3] + rig.text(prompt, OUTPUTS, outputs=wanted[:3], **SAMPLING) == wanted


def test_behind_a_cached_prefix_drafts_change_nothing_either():
    """Replay: the second prompt goes on behind the first one's pages, and its draft context begins with replayed rows."""
    prompts = [prompt_of(6, 40), prompt_of(6, 40)[:35] + prompt_of(7, 8)]

    def texts(model, **settings):
        with rig_of(model, **settings) as rig:
            found = [rig.text(prompt, 6, **SAMPLING) for prompt in prompts]
            assert rig.engine.statistics()["cached_tokens"] == 32
            return found

    wanted = texts(v41(None), speculation=OFF)
    assert texts(v41(None)) == wanted
    rng = random.Random(2)
    known = [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]
    assert texts(DraftingModel(v41(None), known, lambda: rng.random() < 0.7)) == wanted
