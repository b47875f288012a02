"""Replay on the dense reference: modes against each other, chunkings, and the exactness ladder (see docs/v41.md)."""

import functools
import random

import pytest
import torch

from engine.models.deepseek_v41.replay import COMPACT, MASK, OFF, ReplayRule
from tests.fakes.v41_reference import (
    DECODER_LAYERS,
    ENCODER_LAYERS,
    WINDOW,
    largest_difference,
    prompt,
    readable_rows,
    run,
    started,
    tiny,
    tiny_reference,
)

torch.set_num_threads(1)
LENGTH, KEEP = 101, 20
REACH = WINDOW - 1
IDS = prompt(140)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def rule_of(mode, keep=KEEP, known=LENGTH, **fields):
    return ReplayRule(mode=mode, keep=keep, known_tokens=known, **fields)


def prefilled(sizes, rule, *, quantized=True, ids=IDS[:LENGTH]):
    reference = tiny_reference(quantized=quantized)
    cache = started(reference, ids)
    return cache, run(reference, cache, sizes, rule)


@functools.cache
def whole_pass(length=LENGTH, *, quantized=True):
    """Return cache and result of a pass that leaves nothing out; read only."""
    cache, (result,) = prefilled([length], None, quantized=quantized, ids=IDS[:length])
    return cache, result


def state(cache, rule=None):
    rule = rule or ReplayRule()
    return readable_rows(cache, tiny(), rule.floor, rule.decoder_floor)


def backbone_state(cache):
    """Return what target rows read, without the draft model's context."""
    rows = readable_rows(cache, tiny(), 0)
    drafts = {f"window {tiny().num_layers + i}" for i in range(len(tiny().stages))}
    return {name: tensor for name, tensor in rows.items() if name not in drafts}


def hit(cached, replayed, length, *, quantized, forget=True):
    """Return the cache of a request whose first `cached` tokens hit and whose last `replayed` of them run again."""
    reference = tiny_reference(quantized=quantized)
    before = started(reference, IDS[:length])
    run(reference, before, [cached])
    if not forget:
        return before
    cache = started(reference, IDS[:length])
    for i in cache.entries:
        count = cached // tiny().layers[i].m
        cache.entries[i].write(0, before.entries[i].read(0, count))
        cache.index_keys[i].write(0, before.index_keys[i].read(0, count))
    return cache


def test_compact_equals_mask_on_the_kept_rows_and_in_all_state():
    compact, (kept,) = prefilled([LENGTH], rule_of(COMPACT))
    mask, (every,) = prefilled([LENGTH], rule_of(MASK))
    assert kept.positions.tolist() == list(range(LENGTH - KEEP, LENGTH))
    assert (kept.logits - every.logits[-KEEP:]).abs().max() < 1e-12
    assert largest_difference(state(compact, rule_of(MASK)), state(mask, rule_of(MASK))) < 1e-12


def test_a_placeholder_row_equals_its_row_under_mask():
    _, (placeholder, *_) = prefilled([60, 41], rule_of(COMPACT))
    _, (every, *_) = prefilled([60, 41], rule_of(MASK))
    assert placeholder.positions.tolist() == [59]
    assert (placeholder.logits - every.logits[-1:]).abs().max() < 1e-12


def chunkings():
    draw = random.Random(4)
    fixed = [[100, 1], [81, 20], [80, 21], [82, 19], [80, 1, 20], [1, 99, 1], [50, 50, 1]]
    for _ in range(2):
        borders = sorted(draw.sample(range(1, LENGTH), draw.randint(2, 5)))
        fixed.append([b - a for a, b in zip([0, *borders], [*borders, LENGTH], strict=True)])
    return fixed


@pytest.mark.parametrize("mode", [COMPACT, MASK])
def test_under_replay_every_chunking_equals_one_shot(mode):
    rule = rule_of(mode)
    one, (whole,) = prefilled([LENGTH], rule)
    for sizes in chunkings() if mode == COMPACT else chunkings()[::3]:
        cache, results = prefilled(sizes, rule)
        last = results[-1].logits
        assert (last[-1] - whole.logits[-1]).abs().max() < 1e-9, sizes
        assert largest_difference(state(cache, rule), state(one, rule)) < 1e-9, sizes


def test_decoding_after_compact_equals_mask_over_everything():
    length, rule = LENGTH + 12, rule_of(COMPACT)
    cache, _ = prefilled([90, 11], rule, ids=IDS[:length])
    steps = run(tiny_reference(), cache, [1, 1, 6, 1, 3], rule, start=LENGTH)
    _, (every,) = prefilled([length], rule_of(MASK), ids=IDS[:length])
    got = torch.cat([step.logits for step in steps])
    assert (got - every.logits[LENGTH:]).abs().max() < 1e-9


def test_a_request_that_runs_whole_is_never_cut():
    for rule in (rule_of(OFF), rule_of(COMPACT, known=0), rule_of(COMPACT, keep=LENGTH)):
        cache, (result,) = prefilled([LENGTH], rule)
        assert len(result.positions) == LENGTH
        assert largest_difference(state(cache), state(whole_pass()[0])) == 0


def test_rows_times_layers_are_those_of_the_case_table():
    layers = ENCODER_LAYERS + DECODER_LAYERS
    count = lambda results: sum(result.layer_rows for result in results)
    assert whole_pass()[1].layer_rows == LENGTH * layers
    assert count(prefilled([LENGTH], rule_of(MASK))[1]) == LENGTH * layers
    assert count(prefilled([LENGTH], rule_of(COMPACT))[1]) == LENGTH * ENCODER_LAYERS + KEEP * DECODER_LAYERS
    # Chunks of 50, 50, 1: the first sends a placeholder, the second the 19 kept rows that it has.
    chunked = count(prefilled([50, 50, 1], rule_of(COMPACT))[1])
    assert chunked == LENGTH * ENCODER_LAYERS + (1 + 19 + 1) * DECODER_LAYERS
    cache = hit(64, 8, LENGTH, quantized=True)
    rule = rule_of(COMPACT, floor=56, write_from=64)
    result = tiny_reference().forward(cache, 56, LENGTH, rule)
    assert result.layer_rows == (LENGTH - 56) * ENCODER_LAYERS + KEEP * DECODER_LAYERS


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "plain"])
def test_ladder_decode_state_is_that_of_a_full_prefill_from_the_decoders_whole_reach_on(quantized):
    bound = DECODER_LAYERS * REACH
    full = backbone_state(whole_pass(quantized=quantized)[0])
    for sizes in ([LENGTH], [70, 30, 1]):
        at, _ = prefilled(sizes, rule_of(COMPACT, keep=bound), quantized=quantized)
        assert largest_difference(backbone_state(at), full) < 1e-9
    below, _ = prefilled([LENGTH], rule_of(COMPACT, keep=bound - 1), quantized=quantized)
    assert largest_difference(backbone_state(below), full) > (1e-6 if quantized else 1e-10)


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "plain"])
def test_ladder_last_logits_and_draft_context_need_one_token_more(quantized):
    bound = DECODER_LAYERS * REACH + 1
    full, whole = whole_pass(quantized=quantized)
    for sizes in ([LENGTH], [70, 30, 1]):
        cache, results = prefilled(sizes, rule_of(COMPACT, keep=bound), quantized=quantized)
        assert (results[-1].logits[-1] - whole.logits[-1]).abs().max() < 1e-9
        assert largest_difference(state(cache), state(full)) < 1e-9
    below, (result,) = prefilled([LENGTH], rule_of(COMPACT, keep=bound - 1), quantized=quantized)
    threshold = 1e-6 if quantized else 1e-11
    assert (result.logits[-1] - whole.logits[-1]).abs().max() > threshold
    assert largest_difference(state(below), state(full)) > threshold


def test_a_prompt_no_longer_than_the_keep_length_is_exact():
    full, whole = whole_pass()
    for keep in (LENGTH, 500):
        cache, (result,) = prefilled([LENGTH], rule_of(COMPACT, keep=keep))
        assert (result.logits - whole.logits).abs().max() == 0
        assert largest_difference(state(cache), state(full)) == 0


def global_part(cache):
    rows = readable_rows(cache, tiny(), 10**6, 10**6)
    return {name: tensor for name, tensor in rows.items() if not name.startswith("window")}


@pytest.mark.parametrize("mode", [OFF, COMPACT])
@pytest.mark.parametrize(("cached", "replayed", "length"), [(64, 8, 101), (64, 8, 66), (8, 8, 60), (4, 4, 9)])
def test_encoder_replay_equals_a_pass_that_only_has_the_floor(cached, replayed, length, mode):
    """Windows that are there but masked, against windows that are gone."""
    floor = cached - replayed
    rule = rule_of(mode, known=length, floor=floor, write_from=cached)
    results, caches = [], []
    for forget in (True, False):
        cache = hit(cached, replayed, length, quantized=True, forget=forget)
        results.append(tiny_reference().forward(cache, floor, length, rule))
        caches.append(cache)
    assert (results[0].logits - results[1].logits).abs().max() == 0
    assert largest_difference(state(caches[0], rule), state(caches[1], rule)) == 0


def test_encoder_replay_writes_nothing_below_the_hit_and_does_not_depend_on_chunks():
    rule = rule_of(COMPACT, floor=56, write_from=64)
    reference = tiny_reference()
    whole = hit(64, 8, LENGTH, quantized=True)
    before = {i: rows.read(0, 64 // tiny().layers[i].m).clone() for i, rows in whole.entries.items()}
    expected = reference.forward(whole, 56, LENGTH, rule)
    for i, rows in before.items():
        assert (whole.entries[i].read(0, len(rows)) - rows).abs().max() == 0
    for sizes in ([3, 5, 36, 1], [9, 15, 20, 1], [8, 37]):
        cache = hit(64, 8, LENGTH, quantized=True)
        results = run(reference, cache, sizes, rule, start=56)
        assert (results[-1].logits[-1] - expected.logits[-1]).abs().max() < 1e-9
        assert largest_difference(state(cache, rule), state(whole, rule)) < 1e-9


def test_ladder_suffix_entries_are_exact_from_the_encoders_whole_reach_on():
    bound, cached, length = ENCODER_LAYERS * REACH, 64, 119
    full, _ = whole_pass(length, quantized=False)
    for replayed, exact in ((bound, True), (bound - 1, False)):
        cache = hit(cached, replayed, length, quantized=False)
        rule = ReplayRule(floor=cached - replayed, write_from=cached)
        tiny_reference(quantized=False).forward(cache, cached - replayed, length, rule)
        difference = largest_difference(global_part(cache), global_part(full))
        assert difference < 1e-12 if exact else difference > 1e-11


@pytest.mark.parametrize(("length", "exact"), [(107, True), (106, False)])
def test_ladder_last_logits_after_encoder_replay_need_the_whole_models_reach(length, exact):
    """Last row minus floor: 14 layers of 7. The decoder's keep length must not bind for this rung."""
    cached, replayed = 64, ENCODER_LAYERS * REACH
    assert (length - 1 - (cached - replayed) >= (ENCODER_LAYERS + DECODER_LAYERS) * REACH) == exact
    _, whole = whole_pass(length)
    cache = hit(cached, replayed, length, quantized=True)
    result = tiny_reference().forward(
        cache, cached - replayed, length, ReplayRule(floor=cached - replayed, write_from=cached)
    )
    difference = (result.logits[-1] - whole.logits[-1]).abs().max()
    assert difference < 1e-9 if exact else difference > 1e-6


def test_ladder_both_replays_together_are_exact_when_both_bounds_hold():
    cached, replayed, length = 64, ENCODER_LAYERS * REACH, 107
    keep = DECODER_LAYERS * REACH + 1
    _, whole = whole_pass(length)
    cache = hit(cached, replayed, length, quantized=True)
    rule = ReplayRule(
        mode=COMPACT, keep=keep, known_tokens=length, floor=cached - replayed, write_from=cached
    )  # fmt: skip
    result = tiny_reference().forward(cache, cached - replayed, length, rule)
    assert (result.logits[-1] - whole.logits[-1]).abs().max() < 1e-9


def test_a_chunk_keeps_at_least_its_last_row():
    rule = rule_of(COMPACT)
    floor = LENGTH - KEEP
    assert rule.first_kept(0, 10) == 9
    assert rule.first_kept(0, floor) == floor - 1
    assert rule.first_kept(0, floor + 1) == floor
    assert rule.first_kept(floor + 3, LENGTH) == floor + 3
    assert rule.first_kept(LENGTH, LENGTH + 6) == LENGTH
