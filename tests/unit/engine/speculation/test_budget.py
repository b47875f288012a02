import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.budget import StepTimes, choose_budget, survivals, verify_lengths

NAN = float("nan")


def test_a_survival_is_the_product_of_confidences_up_to_it():
    found = survivals(np.array([[0.5, 0.5, 1.0], [1.0, NAN, 1.0]], np.float32))
    assert found.tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]


def test_when_time_does_not_depend_on_size_every_draft_that_may_survive_is_worth_it():
    survival = np.array([[0.9, 0.1], [0.01, 0.0]], np.float32)
    assert choose_budget(survival, 2, lambda sizes: np.ones(len(sizes))) == 3


def test_when_time_grows_with_every_token_none_is():
    survival = np.array([[0.9, 0.8]], np.float32)
    assert choose_budget(survival, 1, lambda sizes: sizes.astype(np.float64)) == 0


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    base=st.floats(0.1, 20),
    slope=st.floats(0.001, 2),
)
def test_the_budget_is_the_best_of_all_by_brute_force(rows, base, slope):
    survival = survivals(np.array(rows, np.float32))
    ordered = sorted((float(s) for s in survival.reshape(-1) if s > 0), reverse=True)
    rates = [(len(rows) + sum(ordered[:k])) / (base + slope * (len(rows) + k)) for k in range(len(ordered) + 1)]
    found = choose_budget(survival, len(rows), lambda sizes: base + slope * sizes)
    assert rates[found] == pytest.approx(max(rates))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=5),
    budget=st.integers(0, 25),
)
def test_the_most_likely_survivors_are_a_prefix_of_every_row(rows, budget):
    survival = survivals(np.array(rows, np.float32))
    lengths = verify_lengths(survival, budget)
    pairs = sorted(itertools.product(range(len(rows)), range(4)), key=lambda pair: (-survival[pair], pair[0], pair[1]))
    chosen = {pair for pair in pairs[:budget] if survival[pair] > 0}
    assert chosen == {(row, i) for row, length in enumerate(lengths.tolist()) for i in range(length)}


def test_times_of_steps_are_smoothed_interpolated_and_never_fall():
    times = StepTimes()
    assert not times.are_known
    times.note(4, 1.0)
    assert not times.are_known
    times.note(8, 3.0)
    assert times.are_known
    assert times.seconds(np.array([1, 4, 6, 8, 20])).tolist() == [1.0, 1.0, 2.0, 3.0, 3.0]
    times.note(8, 13.0)
    assert times.seconds(np.array([8]))[0] == pytest.approx(4.0)
    times.note(12, 0.5)
    assert times.seconds(np.array([12]))[0] == pytest.approx(4.0)


def test_steps_that_computed_nothing_are_not_timed():
    times = StepTimes()
    times.note(0, 1.0)
    times.note(5, 0.0)
    times.note(-1, 1.0)
    assert not times.are_known
