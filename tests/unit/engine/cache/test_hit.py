import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.hit import Hit, every_prefix, only_nothing


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
