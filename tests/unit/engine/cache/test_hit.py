import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.hit import PAGES, Hit, ReuseKind, ReuseRule, every_prefix, only_nothing


def hit(num_device, legal):
    return Hit(hashes=(), pages=np.arange(num_device, dtype=np.int32), legal=np.asarray(legal, np.bool_), version=0)


@given(st.lists(st.booleans(), max_size=12))
def test_legal_prefixes_equal_brute_force(present):
    expected = [all(present[:length]) for length in range(len(present) + 1)]
    assert every_prefix(np.asarray(present, np.bool_)).tolist() == expected


@given(st.lists(st.booleans(), max_size=12))
def test_row_state_makes_only_nothing_legal(present):
    assert np.flatnonzero(only_nothing(np.asarray(present, np.bool_))).tolist() == [0]


def test_the_longest_length_respects_limit_device_and_legality():
    found = hit(3, [True, False, True, True, True, False])
    assert [found.longest_on_device(limit) for limit in (-1, 0, 1, 2, 3, 9)] == [0, 0, 0, 2, 3, 3]
    assert [found.longest(limit) for limit in (0, 1, 4, 5)] == [0, 0, 4, 4]


REPLAY = ReuseRule(kind=ReuseKind.REPLAY, replay_tokens=8, align_tokens=2, keep_tokens=10)


def test_behind_a_hit_the_last_rows_are_computed_again():
    assert [REPLAY.encoder_floor(hit) for hit in (0, 4, 8, 12)] == [0, 0, 0, 4]
    assert [PAGES.encoder_floor(hit) for hit in (0, 4, 12)] == [0, 4, 12]


def test_a_hit_gains_only_what_need_not_be_computed_again():
    assert [REPLAY.gains(hit) for hit in (0, 8, 9)] == [False, False, True]
    assert [PAGES.gains(hit) for hit in (0, 1)] == [False, True]


def test_only_the_end_of_a_prompt_runs_through_every_layer():
    assert [REPLAY.decoder_floor(tokens) for tokens in (3, 10, 15)] == [0, 0, 5]
    assert [REPLAY.known_tokens(floor) for floor in (0, 5)] == [0, 15]
    assert PAGES.decoder_floor(100) == PAGES.known_tokens(0) == 0
