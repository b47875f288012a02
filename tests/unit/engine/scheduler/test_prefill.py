import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from engine.scheduler.prefill import (
    Candidates,
    PageGate,
    admission_order,
    continuing_budget,
    passed_over,
    prefill_budget,
    reserved,
    share_budget,
    split_budget,
)


def waiting(**columns):
    n = len(next(iter(columns.values())))
    defaults = {
        "arrival": np.arange(n, dtype=np.int64),
        "priority": np.zeros(n, np.int32),
        "uncached": np.full(n, 100, np.int64),
        "waited_tokens": np.zeros(n, np.int64),
        "waited_s": np.zeros(n),
        "bypassed": np.zeros(n, np.int32),
        "retracted": np.zeros(n, np.bool_),
    }
    return Candidates(**{name: np.asarray(columns.get(name, value), value.dtype) for name, value in defaults.items()})


def order(candidates, max_bypass=32):
    return admission_order(candidates, reserved(candidates, max_bypass, 2.0)).tolist()


def test_without_waiting_time_the_order_is_that_of_arrival():
    assert order(waiting(arrival=[2, 0, 1])) == [1, 2, 0]


def test_a_short_prompt_overtakes_long_ones_that_waited_as_long():
    assert order(waiting(uncached=[1000, 10, 300], waited_tokens=[500, 500, 500])) == [1, 2, 0]


def test_a_long_prompt_ages_until_it_is_first():
    assert order(waiting(uncached=[1000, 10], waited_tokens=[100_000, 50])) == [0, 1]


def test_classes_come_before_scores():
    assert order(waiting(priority=[1, 0], waited_tokens=[10_000, 0])) == [1, 0]


def test_retracted_sequences_come_first_in_order_of_arrival_whatever_their_class():
    candidates = waiting(arrival=[5, 3, 1], priority=[2, 0, 0], retracted=[True, False, True])
    assert order(candidates) == [2, 0, 1]


def test_the_oldest_of_those_passed_over_too_often_is_reserved_one_per_class():
    candidates = waiting(arrival=[4, 2, 3, 1], priority=[0, 0, 1, 1], bypassed=[40, 32, 32, 31])
    assert reserved(candidates, 32, 1e9).tolist() == [False, True, True, False]


def test_waiting_long_reserves_only_who_was_passed_over():
    candidates = waiting(bypassed=[0, 1], waited_s=[9.0, 9.0])
    assert reserved(candidates, 32, 2.0).tolist() == [False, True]


def test_a_reserved_prompt_is_first_in_its_class():
    assert order(waiting(uncached=[10, 9999], waited_tokens=[500, 500], bypassed=[0, 32])) == [1, 0]


def test_who_was_overtaken_by_a_later_arrival_of_its_class_or_a_lower_one_is_passed_over():
    def overtaken(*admitted):
        return passed_over(np.arange(4), np.array([0, 0, 1, 0]), np.array(admitted, np.bool_)).tolist()

    assert overtaken(False, True, False, False) == [True, False, False, False]
    assert overtaken(False, False, True, False) == [True, True, False, False]
    assert overtaken(True, True, False, False) == [False] * 4


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 500), st.integers(0, 500), st.booleans()), max_size=12),
    st.integers(0, 3),
)
def test_the_order_is_a_permutation_that_respects_retraction_then_class(rows, max_bypass):
    priority, uncached, waited, retracted = zip(*rows, strict=True) if rows else ((), (), (), ())
    candidates = waiting(priority=priority, uncached=uncached, waited_tokens=waited, retracted=retracted)
    got = order(candidates, max_bypass)
    assert sorted(got) == list(range(len(rows)))
    keys = [(-1 if candidates.retracted[i] else candidates.priority[i]) for i in got]
    assert keys == sorted(keys)


# The gate.


def test_a_margin_is_kept_unless_nothing_else_is_active():
    gate = PageGate(margin=3)
    assert gate.fits(7, 10, alone=False)
    assert not gate.fits(8, 10, alone=False)
    assert gate.fits(10, 10, alone=True)


def test_pages_kept_for_a_reservation_are_closed_to_others():
    gate = PageGate(margin=0)
    gate.keep(6)
    assert gate.fits(4, 10, alone=False)
    assert not gate.fits(5, 10, alone=True)


def test_admissions_widen_the_margin_and_a_closed_gate_lets_nobody_pass():
    gate = PageGate(margin=0)
    gate.widen(2)
    assert not gate.fits(9, 10, alone=False)
    gate.close()
    assert not gate.fits(0, 10, alone=True)


# The budget.

PROMPTS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 60)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(PROMPTS, st.integers(0, 64), st.integers(1, 8))
def test_chunks_stay_in_the_budget_and_end_on_page_borders_or_at_the_end(prompts, budget, size):
    start = np.array([pages * size for pages, _ in prompts], np.int32)
    goal = start + np.array([length for _, length in prompts], np.int32)
    lengths = split_budget(start, goal, budget, size)
    ends = start + lengths
    assert lengths.sum() <= budget
    assert (lengths >= 0).all()
    assert (ends <= goal).all()
    assert ((ends % size == 0) | (ends == goal)).all()


@settings(max_examples=60)
@given(PROMPTS, st.integers(1, 64), st.integers(1, 8))
def test_the_budget_is_used_up_as_far_as_page_borders_allow_in_order(prompts, budget, size):
    start = np.array([pages * size for pages, _ in prompts], np.int32)
    goal = start + np.array([length for _, length in prompts], np.int32)
    lengths = split_budget(start, goal, budget, size)
    left = budget
    for i, length in enumerate(lengths.tolist()):
        remaining = int(goal[i] - start[i])
        assert length == (remaining if remaining <= left else left - left % size)
        left -= length


def test_a_prompt_always_progresses_with_a_page_of_budget():
    assert split_budget(np.array([8], np.int32), np.array([100], np.int32), 4, 4).tolist() == [4]
    assert prefill_budget(chunk_tokens=16, decode_rows=200, page_tokens=4) == 4
    assert prefill_budget(chunk_tokens=16, decode_rows=3, page_tokens=4) == 13


def test_half_computed_prompts_leave_a_share_when_others_wait():
    assert continuing_budget(100, 0.75, 4, others_wait=True) == 75
    assert continuing_budget(100, 0.75, 4, others_wait=False) == 100
    assert continuing_budget(4, 0.75, 4, others_wait=True) == 4


@settings(max_examples=60)
@given(PROMPTS, st.integers(1, 64), st.integers(1, 8))
def test_the_oldest_goes_on_in_every_step_and_nothing_is_wasted(prompts, more, size):
    budget = size + more
    start = np.array([pages * size for pages, _ in prompts], np.int32)
    goal = start + np.array([length for _, length in prompts], np.int32)
    lengths = share_budget(start, goal, budget, size, 0.25)
    ends = start + lengths
    assert lengths[0] >= min(size, goal[0] - start[0])
    assert lengths.sum() <= budget
    assert ((ends % size == 0) | (ends == goal)).all()
    assert lengths.sum() > budget - size or (ends == goal).all() or ends[0] == goal[0]


def test_a_short_rest_is_computed_beside_the_oldest():
    start, goal = np.array([0, 0, 0], np.int32), np.array([1000, 60, 20], np.int32)
    assert share_budget(start, goal, 100, 4, 0.25).tolist() == [28, 52, 20]
    assert share_budget(start[:1], goal[:1], 100, 4, 0.25).tolist() == [100]
    assert share_budget(start[:0], goal[:0], 100, 4, 0.25).tolist() == []
