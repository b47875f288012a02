"""DeepSeek-V4.1 (tiny) with images under the engine, against the dense reference that is given the images' rows.

The same tokens and log-probabilities whatever the chunks, the batch, the cache, retractions, resumes and hand-overs; and
every image is encoded once per worker.
"""

import functools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from core.errors import BadRequest
from engine.cache.hit import ReuseKind, ReuseRule
from engine.config import SpeculationConfig
from engine.images import ImageFacts
from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.model import DraftingDeepseekModel
from engine.models.deepseek_v41.replay import COMPACT, MASK, ReplayRule
from engine.models.deepseek_v41.step import DecoderReplay
from tests.fakes.deepseek_driver import FACTS
from tests.fakes.engine_rig import request_of
from tests.fakes.model_rig import FAR, ModelRig, hand_over
from tests.fakes.v41_reference import prompt, tiny, tiny_reference, tiny_weights, token_map
from tests.fakes.vision import image, prompt_with, tiny_encoder, tiny_rules

KEEP = 20
RULE = ReuseRule(kind=ReuseKind.REPLAY, replay_tokens=8, align_tokens=2, keep_tokens=KEEP)
OUTPUTS = 5
TOLERANCE = 1e-5
"""Log-probabilities come as float32."""
PLAIN = {"speculation": SpeculationConfig(mode="off")}
SMALL, WIDE = image(1, 84, 84), image(2, 84, 126)
IDS, ITEMS = prompt_with([list(prompt(13)), SMALL, list(prompt(3, seed=1)), WIDE, list(prompt(9, seed=2))])
"""43 tokens; images at 13..21 and 24..34, pages of 8."""


class CountingEncoder:
    def __init__(self):
        self.count = 0

    def encode(self, pixels):
        self.count += 1
        return tiny_encoder().encode(pixels)


class ImageRig(ModelRig):
    """An engine whose encoder counts."""

    def __init__(self, **settings):
        self.encoder = CountingEncoder()
        model = DraftingDeepseekModel(
            tiny(),
            tiny_weights(),
            replace(FACTS, reuse=RULE, images=ImageFacts(token_id=tiny().image_token_id, rules=tiny_rules())),
            arithmetic_of(tiny()),
            token_map=token_map(),
            replay=DecoderReplay(mode=COMPACT, keep=KEEP),
            image_encoder=self.encoder,
        )
        self.borders = set()
        super().__init__("", model=model, **{"chunk_tokens": 40, "num_pages": 80, **settings})

    def turn(self):
        rows = self.engine._holdings.rows
        self.borders |= {(int(rows.seq[r]), int(rows.scheduled[r])) for r in range(rows.num_rows)}
        return super().turn()


def request(ids=IDS, items=ITEMS, said=()):
    return request_of(ids, OUTPUTS, outputs=said, mm_items=items, temperature=0.0, num_logprobs=0)


def ask(rig, *args, **fields):
    return rig.engine.submit(request(*args, **fields), FAR)


def dense_rows(items, length):
    """[length, d]: rows of images at their places."""
    rows = torch.zeros(length, tiny().hidden_size, dtype=torch.float64)
    for item in items:
        pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.height, item.width, 3)
        rows[item.start : item.end] = tiny_encoder().encode(torch.from_numpy(pixels.copy()))
    return rows


@functools.cache
@torch.inference_mode()
def truth(ids=IDS, items=ITEMS, hit=0):
    """Greedy tokens and their log-probabilities by the reference, behind a hit of so many tokens."""
    reference, tokens = tiny_reference(), list(ids)
    flags = [i == tiny().image_token_id for i in ids]
    dense = dense_rows(items, len(ids))
    cache = reference.new_cache()
    cache.extend(tokens, flags)
    narrowed = {"mode": MASK, "keep": KEEP, "known_tokens": len(ids)}
    if hit:
        reference.forward(cache, 0, hit, image_rows=dense[:hit])
    floor = max(0, hit - RULE.replay_tokens)
    rule = ReplayRule(floor=floor, write_from=hit, **narrowed)
    logits = reference.forward(cache, floor, len(ids), rule, image_rows=dense[floor:]).logits
    logprobs = []
    for _ in range(OUTPUTS):
        row = logits[-1]
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.log_softmax(-1)[tokens[-1]]))
        cache.extend(tokens[-1:])
        logits = reference.forward(cache, len(tokens) - 1, len(tokens), rule).logits
    return tuple(tokens[len(ids) :]), tuple(logprobs)


def assert_true(rig, seq, expected, skipped=0):
    tokens, logprobs = expected
    assert tuple(rig.sink.tokens[seq]) == tokens[skipped:]
    got = [item.logprob for item in rig.sink.logprobs[seq]]
    assert got == pytest.approx(logprobs[-len(got) :], abs=TOLERANCE)


def test_the_reference_sees_the_images():
    other = msgspec.structs.replace(image(3, 84, 84), start=ITEMS[0].start, end=ITEMS[0].end)
    assert max(abs(a - b) for a, b in zip(truth()[1], truth(items=(other, ITEMS[1]))[1], strict=True)) > 10 * TOLERANCE


@pytest.mark.parametrize("settings", [{}, PLAIN], ids=["drafted", "plain"])
@pytest.mark.parametrize("chunk", [64, 40, 16])
def test_any_chunks_give_the_references_text_and_cut_no_image(chunk, settings):
    with ImageRig(chunk_tokens=chunk, **settings) as rig:
        seq = ask(rig)
        rig.run()
        assert_true(rig, seq, truth())
        assert rig.encoder.count == 2
        inside = {at for item in ITEMS for at in range(item.start + 1, item.end)}
        assert not inside & {at for _, at in rig.borders}


def test_beside_others_and_with_the_same_image_elsewhere():
    ids, items = prompt_with([list(prompt(4, seed=5)), WIDE, list(prompt(6, seed=6)), SMALL, list(prompt(2, seed=7))])
    with ImageRig(num_pages=120) as rig:
        first = ask(rig)
        text = ask(rig, prompt(30, seed=8), ())
        second = ask(rig, ids, items)
        rig.run()
        assert_true(rig, first, truth())
        assert_true(rig, second, truth(ids, items))
        assert_true(rig, text, truth(prompt(30, seed=8), ()))
        assert rig.encoder.count == 2


def test_a_hit_that_ends_inside_an_image_goes_on_with_the_rest_of_it():
    other = (*IDS[:34], *prompt(7, seed=9))
    with ImageRig() as rig:
        seq = ask(rig)
        rig.run()
        again = ask(rig, other, ITEMS)
        rig.run()
        assert rig.sink.started[seq].floors.hit_tokens == 0
        assert rig.sink.started[again].floors.hit_tokens == 32
        assert_true(rig, again, truth(other, ITEMS, hit=32))
        assert rig.encoder.count == 2


def test_another_image_of_the_same_size_shares_only_what_is_before_it():
    changed = msgspec.structs.replace(image(3, 84, 126), start=ITEMS[1].start, end=ITEMS[1].end)
    items = (ITEMS[0], changed)
    with ImageRig() as rig:
        ask(rig)
        rig.run()
        seq = ask(rig, IDS, items)
        rig.run()
        assert rig.sink.started[seq].floors.hit_tokens == 24
        assert_true(rig, seq, truth(IDS, items, hit=24))
        assert rig.encoder.count == 3


def test_after_a_retraction_with_an_empty_cache_the_images_are_computed_again():
    with ImageRig() as rig:
        seq = ask(rig)
        while len(rig.sink.tokens[seq]) < 2:
            rig.turn()
        assert rig.engine._planner._retract_one(0.0, keep=0)
        rig.engine.flush_cache()
        rig.run()
        assert_true(rig, seq, truth())
        assert rig.encoder.count == 2


def test_a_resume_elsewhere_goes_on():
    said = truth()[0][:2]
    with ImageRig() as rig:
        seq = rig.engine.submit(
            msgspec.structs.replace(
                request(said=said), encoder_floor=0, decoder_floor=len(IDS) - KEEP, floor_hit_tokens=0
            ),
            FAR,
        )
        rig.run()
        assert_true(rig, seq, truth(), skipped=2)


@pytest.mark.parametrize("retract", [False, True], ids=["kept", "retracted"])
def test_handed_over_is_what_a_single_worker_says(retract):
    with ImageRig(chunk_tokens=40) as source, ImageRig() as target:
        seq = hand_over(source, target, request())
        target.turn()
        assert (source.encoder.count, target.encoder.count) == (2, 0)
        if retract:
            assert target.engine._planner._retract_one(0.0, keep=0)
            target.engine.flush_cache()
        target.run()
        tokens, _ = truth()
        assert tuple(target.sink.tokens[seq]) == tokens
        assert target.encoder.count == (2 if retract else 0)


def test_a_worker_that_takes_no_images_says_so():
    with ImageRig(images=False) as rig, pytest.raises(BadRequest, match="takes no images"):
        ask(rig)


def test_the_generated_checkpoint_takes_images_through_the_registry():
    with ModelRig("v41-tiny:f32:replay", chunk_tokens=40, num_pages=80) as rig:
        assert rig.model.facts.images == ImageFacts(token_id=510, rules=tiny_rules())
        pixels = np.frombuffer(SMALL.pixels, np.uint8).reshape(84, 84, 3).copy()
        got = rig.model.image_encoder.encode(torch.from_numpy(pixels))
        assert torch.equal(got, tiny_encoder(torch.float32).encode(torch.from_numpy(pixels)))
        seq = ask(rig)
        rig.run()
        whole = rig.sink.tokens[seq], [item.logprob for item in rig.sink.logprobs[seq]]
    with ModelRig("v41-tiny:f32:replay", chunk_tokens=16, num_pages=80) as rig:
        seq = ask(rig)
        rig.run()
        assert (rig.sink.tokens[seq], [item.logprob for item in rig.sink.logprobs[seq]]) == whole
