"""Replay by the engine: what a hit costs and changes, floors that belong to requests, pages of their own kind."""

import random

import pytest

from core.errors import BadRequest, ConfigError, TransferFailed
from core.hashing import event_hash
from core.request import NO_FLOORS, Floors, with_floors
from engine.cache.hit import ReuseKind, ReuseRule
from tests.fakes.engine_rig import hasher_of, request_of
from tests.fakes.replay_rig import FAR, ReplayRig, hand_over
from tests.fakes.replay_runner import RULE, replay_text


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(length)]


PROMPT = prompt_of(1, 41)
LONGER = PROMPT + prompt_of(2, 20)
COLD = Floors(decoder_floor=len(PROMPT) - RULE.keep_tokens)


# What the oracle can see: without this, nothing below proves anything.


@pytest.mark.parametrize(
    "other",
    [
        NO_FLOORS,
        Floors(encoder_floor=14, decoder_floor=32, hits=(20,)),
        Floors(encoder_floor=10, decoder_floor=32, hits=(16,)),
        Floors(encoder_floor=14, decoder_floor=32, hits=(12, 20)),
        Floors(encoder_floor=14, decoder_floor=31, hits=(20,)),
        Floors(encoder_floor=13, decoder_floor=32, hits=(20,)),
    ],
)
def test_the_oracle_tells_any_two_floors_apart(other):
    floors = [COLD, Floors(encoder_floor=14, decoder_floor=32, hits=(20,))]
    assert all(
        replay_text(PROMPT, 8, floors=one) != replay_text(PROMPT, 8, floors=other) for one in floors if one != other
    )


# Cold prompts.


@pytest.mark.parametrize("chunk", [10, 12, 16, 64])
def test_a_cold_prompt_says_the_same_however_it_is_cut(chunk):
    rig = ReplayRig(chunk_tokens=chunk)
    tokens, floors = rig.ask(PROMPT, 12)
    assert floors == COLD
    assert tokens == rig.truth(PROMPT, 12, COLD)


def test_a_prompt_shorter_than_the_keep_length_runs_whole():
    rig = ReplayRig()
    tokens, floors = rig.ask(PROMPT[:8], 12)
    assert floors == NO_FLOORS
    assert tokens == rig.truth(PROMPT[:8], 12, NO_FLOORS)


# Hits.


@pytest.mark.parametrize("chunk", [10, 16, 64])
def test_a_hit_is_replayed_and_says_what_its_floors_demand(chunk):
    rig = ReplayRig(chunk_tokens=chunk)
    rig.ask(PROMPT, 3)
    rig.runner.computed.clear()
    tokens, floors = rig.ask(LONGER, 12)
    hit = 40
    assert floors == Floors(encoder_floor=hit - 6, decoder_floor=len(LONGER) - 9, hits=(hit,))
    assert tokens == rig.truth(LONGER, 12, floors)
    starts = [(start, write_from) for _, start, _, write_from in rig.runner.computed]
    assert starts[0] == (hit - 6, hit)
    assert all(write_from == hit for _, write_from in starts)


def test_replayed_rows_count_against_the_budget_and_are_not_reported_as_cached_work():
    rig = ReplayRig(chunk_tokens=10)
    rig.ask(PROMPT, 1)
    before = rig.engine.statistics()
    seq = rig.submit(LONGER, 1)
    rig.run()
    after = rig.engine.statistics()
    assert after["prefill_tokens"] - before["prefill_tokens"] == len(LONGER) - 40 + 6
    assert (before["replayed_tokens"], after["replayed_tokens"]) == (0, 6)
    assert rig.sink.started[seq].num_cached_tokens == 40
    assert rig.sink.finished[seq].recomputed_tokens == 0


@pytest.mark.parametrize("length", [4, 5, 7])
def test_a_hit_that_would_be_replayed_whole_is_not_taken(length):
    rig = ReplayRig()
    rig.ask(PROMPT[:length], 1)
    tokens, floors = rig.ask(PROMPT, 5)
    assert floors.hits == ()
    assert tokens == rig.truth(PROMPT, 5, COLD)


def test_pages_behind_a_hit_are_found_again_as_what_they_are():
    rig = ReplayRig()
    third = LONGER + prompt_of(3, 17)
    rig.ask(PROMPT, 3)
    rig.ask(LONGER, 4)
    tokens, floors = rig.ask(third, 10)
    assert floors.hits == (40, 60)
    assert tokens == rig.truth(third, 10, floors)


def test_the_answer_of_a_turn_is_part_of_the_next_ones_hit():
    rig = ReplayRig()
    answer, _ = rig.ask(PROMPT, 16)
    turn = PROMPT + answer + prompt_of(4, 9)
    tokens, floors = rig.ask(turn, 10)
    assert floors.hits == (56,)
    # Pages of a cold prompt and of its answer are exact: the decoder keeps no pages.
    assert tokens == rig.truth(turn, 10, floors)


def test_two_histories_of_one_prompt_keep_their_pages_apart():
    rig = ReplayRig()
    rig.ask(PROMPT[:20], 1)
    _, near = rig.ask(LONGER[:50], 4)
    rig.engine.flush_cache()
    rig.ask(PROMPT, 1)
    _, far = rig.ask(LONGER[:50], 4)
    assert (near.hits, far.hits) == ((20,), (40,))
    tokens, floors = rig.ask(LONGER, 8)
    assert tokens == rig.truth(LONGER, 8, floors)
    # A request with the other history cannot use these pages and rebuilds its own.
    again = with_floors(request_of(LONGER[:50], 8), near)
    seq = rig.engine.submit(again, FAR)
    rig.run()
    assert rig.sink.tokens[seq] == rig.truth(LONGER[:50], 8, near)


def test_those_who_route_find_pages_behind_a_hit_by_their_tokens_alone():
    rig = ReplayRig()
    rig.ask(PROMPT, 3)
    rig.ask(LONGER, 4)
    known = set()
    for event in rig.sink.kv_events:
        assert event.kind == "stored"
        assert not set(event.hashes) & known
        known.update(event.hashes)
    hasher = hasher_of(rig.config)
    assert {event_hash(page) for page in hasher.extend(hasher.root(), LONGER)} <= known
    rig.holdings.pool.free(rig.holdings.tree.evict(100), rig.holdings.launched)
    rig.submit([1], 1)
    rig.run()
    gone = [name for event in rig.sink.kv_events if event.kind == "removed" for name in event.hashes]
    assert sorted(gone) == sorted(known)


# Exactness.


def test_an_exact_request_hits_nothing_and_is_exact():
    rig = ReplayRig()
    rig.ask(PROMPT, 1)
    rig.ask(LONGER, 1)
    seq = rig.engine.submit(with_floors(request_of(LONGER, 10), NO_FLOORS), FAR)
    rig.run()
    assert rig.sink.tokens[seq] == rig.truth(LONGER, 10, NO_FLOORS)
    assert rig.sink.started[seq].floors == NO_FLOORS
    assert rig.sink.started[seq].num_cached_tokens == 0


def test_the_exact_mode_of_a_model_hits_nothing():
    rig = ReplayRig(rule=ReuseRule(kind=ReuseKind.NONE))
    rig.ask(PROMPT, 1)
    tokens, floors = rig.ask(LONGER, 10)
    assert floors == NO_FLOORS
    assert tokens == replay_text(LONGER, 10, floors=NO_FLOORS)


def test_an_exact_request_heals_what_approximate_ones_left():
    rig = ReplayRig()
    rig.ask(PROMPT, 1)
    rig.ask(LONGER, 1)
    seq = rig.engine.submit(with_floors(request_of(LONGER, 1), NO_FLOORS), FAR)
    rig.run()
    assert seq in rig.sink.finished
    tokens, floors = rig.ask(LONGER + [5], 6)
    assert floors.hits == (60,), "of two equally long prefixes the exact one is taken"
    assert tokens == rig.truth([*LONGER, 5], 6, floors)


def test_other_tenants_and_salts_share_no_page_behind_a_hit():
    rig = ReplayRig()
    rig.ask(PROMPT, 1)
    rig.ask(LONGER, 1)
    tokens, floors = rig.ask(LONGER, 5, cache_salt="other")
    assert floors.hits == ()
    assert tokens == rig.truth(LONGER, 5, floors)


# Floors belong to the request.


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_retraction_keeps_the_floors_and_the_text(after):
    rig = ReplayRig()
    rig.ask(PROMPT, 1)
    seq = rig.submit(LONGER, 16)
    rig.turn()
    while len(rig.sink.tokens[seq]) < after:
        rig.turn()
    floors = rig.sink.started[seq].floors
    assert floors.hits == (40,)
    assert rig.engine._planner._retract_one(0.0, keep=0)
    rig.run()
    assert rig.sink.tokens[seq] == rig.truth(LONGER, 16, floors)
    assert rig.engine.statistics()["retractions"] == 1


def test_a_retraction_whose_hit_is_gone_computes_the_hit_again_first():
    rig = ReplayRig()
    rig.ask(PROMPT, 1)
    rig.ask(LONGER, 1)
    third = LONGER + prompt_of(3, 11)
    seq = rig.submit(third, 16)
    while len(rig.sink.tokens[seq]) < 5:
        rig.turn()
    floors = rig.sink.started[seq].floors
    assert floors.hits == (40, 60)
    assert rig.engine._planner._retract_one(0.0, keep=0)
    rig.engine.flush_cache()
    rig.run()
    assert rig.sink.tokens[seq] == rig.truth(third, 16, floors)


def test_a_retraction_before_the_first_token_may_build_on_what_it_computed():
    rig = ReplayRig(chunk_tokens=10)
    seq = rig.submit(LONGER, 8)
    for _ in range(4):
        rig.turn()
    assert seq not in rig.sink.started
    assert rig.engine._planner._retract_one(0.0, keep=0)
    rig.run()
    floors = rig.sink.started[seq].floors
    assert floors.hits != ()
    assert rig.sink.tokens[seq] == rig.truth(LONGER, 8, floors)


@pytest.mark.parametrize("warm", [(), (PROMPT,), (PROMPT, LONGER), (LONGER + [1, 2, 3],)])
@pytest.mark.parametrize("floors", [Floors(decoder_floor=52), Floors(34, 52, (40,)), Floors(14, 52, (12, 20))])
def test_a_resumed_request_goes_on_as_its_first_attempt_would_have_on_any_cache(warm, floors):
    wanted = replay_text(LONGER, 20, floors=floors)
    rig = ReplayRig()
    for prompt in warm:
        rig.ask(prompt, 1)
    seq = rig.engine.submit(with_floors(request_of(LONGER, 20, outputs=wanted[:13]), floors), FAR)
    rig.run()
    assert rig.sink.tokens[seq] == wanted[13:]
    assert rig.sink.started[seq].floors == floors


@pytest.mark.parametrize(
    "floors",
    [
        Floors(encoder_floor=33, decoder_floor=52, hits=(40,)),
        Floors(encoder_floor=34, decoder_floor=51, hits=(40,)),
        Floors(encoder_floor=33, decoder_floor=52, hits=(39,)),
        Floors(encoder_floor=34, decoder_floor=52, hits=(40, 40)),
        Floors(encoder_floor=58, decoder_floor=52, hits=(64,)),
        Floors(encoder_floor=0, decoder_floor=52, hits=(4,)),
    ],
)
def test_floors_that_no_attempt_here_could_have_made_are_refused(floors):
    with pytest.raises(BadRequest, match="floors"):
        ReplayRig().engine.submit(with_floors(request_of(LONGER, 5), floors), FAR)


# Between workers.


@pytest.mark.parametrize("source_warm", [(), (PROMPT,), (PROMPT, LONGER[:53])])
@pytest.mark.parametrize(
    ("target_warm", "held"), [((), 0), ((PROMPT[:21],), 20), ((LONGER,), 60), ((PROMPT, LONGER), 40)]
)
def test_a_handed_over_request_says_what_a_single_worker_with_its_floors_does(source_warm, target_warm, held):
    source, target = ReplayRig(), ReplayRig(num_pages=120)
    for rig, prompts in ((source, source_warm), (target, target_warm)):
        for prompt in prompts:
            rig.ask(prompt, 1)
    seq, moved, done = hand_over(source, target, request_of(LONGER, 14))
    target.run()
    assert target.sink.tokens[seq] == target.truth(LONGER, 14, done.floors)
    kept = min(held, *done.floors.hits[:1]) if done.floors.hits else held
    assert moved == 16 - kept // 4, "the destination's own pages of the same kind are not moved"
    assert target.sink.finished[seq].recomputed_tokens == 0
    source.assert_nothing_held()
    target.assert_nothing_held()


def test_a_destination_that_retracts_computes_with_the_sources_floors():
    source, target = ReplayRig(), ReplayRig()
    source.ask(PROMPT, 1)
    seq, _, done = hand_over(source, target, request_of(LONGER, 16))
    assert done.floors.hits == (40,)
    for _ in range(5):
        target.turn()
    assert target.engine._planner._retract_one(0.0, keep=0)
    target.run()
    assert target.sink.tokens[seq] == target.truth(LONGER, 16, done.floors)


def test_a_destination_without_a_cache_computes_the_sources_hits_again():
    source, target = ReplayRig(), ReplayRig(prefix_cache=False)
    source.ask(PROMPT, 1)
    source.ask(LONGER, 1)
    third = LONGER + prompt_of(3, 11)
    seq, moved, done = hand_over(source, target, request_of(third, 16))
    assert done.floors.hits == (40, 60)
    assert moved == 18
    for _ in range(5):
        target.turn()
    assert target.engine._planner._retract_one(0.0, keep=0)
    target.run()
    assert target.sink.tokens[seq] == target.truth(third, 16, done.floors)


def test_a_request_is_resumed_on_another_pair_with_the_first_ones_floors():
    source, target = ReplayRig(), ReplayRig()
    source.ask(PROMPT, 1)
    seq, _, done = hand_over(source, target, request_of(LONGER, 20))
    while len(target.sink.tokens[seq]) < 9:
        target.turn()
    got = list(target.sink.tokens[seq])
    other_source, other_target = ReplayRig(), ReplayRig()
    other_source.ask(LONGER, 1)
    other_target.ask(PROMPT, 1)
    request = with_floors(request_of(LONGER, 20, outputs=got), done.floors)
    seq, _, again = hand_over(other_source, other_target, request)
    other_target.run()
    assert again.floors == done.floors
    assert got + other_target.sink.tokens[seq] == replay_text(LONGER, 20, floors=done.floors)


def test_a_source_that_went_on_behind_a_shorter_hit_than_our_prefix_is_not_believed():
    source, target = ReplayRig(), ReplayRig()
    target.ask(PROMPT, 1)
    with pytest.raises(TransferFailed, match="shorter hit"):
        hand_over(source, target, request_of(LONGER, 5), spoil=lambda f: Floors(14, f.decoder_floor, (20,)))


def test_a_source_that_used_other_floors_than_asked_for_is_not_believed():
    source, target = ReplayRig(), ReplayRig()
    request = with_floors(request_of(LONGER, 5), Floors(decoder_floor=52))
    with pytest.raises(TransferFailed, match="other replay floors"):
        hand_over(source, target, request, spoil=lambda f: Floors(34, f.decoder_floor, (40,)))


# Settings.


def test_a_chunk_must_hold_the_replayed_rows_and_a_page():
    with pytest.raises(ConfigError, match="set it to 10 or more"):
        ReplayRig(chunk_tokens=9)
    ReplayRig(chunk_tokens=10)


@pytest.mark.parametrize("settings", [{"page_tokens": 3}, {"rule": ReuseRule(ReuseKind.REPLAY, 5, 2, 9)}])
def test_pages_and_replay_must_not_split_an_entry(settings):
    with pytest.raises(ConfigError, match="multiples of"):
        ReplayRig(**settings)
