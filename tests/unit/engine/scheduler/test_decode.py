import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from engine.scheduler import decode


def i32(*values):
    return np.array(values, np.int32)


def test_a_row_whose_last_allowed_token_is_chosen_already_steps_no_more():
    assert decode.can_step(i32(8, 9, 10), i32(10, 10, 10)).tolist() == [True, False, False]


@given(st.integers(0, 200), st.integers(0, 20), st.integers(1, 16))
def test_a_page_is_needed_exactly_when_the_next_slot_is_beyond_the_last_page(scheduled, pages, size):
    needs = bool(decode.needs_page(i32(scheduled), i32(pages), size)[0])
    assert needs == (scheduled // size >= pages)
    soon = [bool(decode.needs_page(i32(scheduled + ahead), i32(pages), size)[0]) for ahead in range(3)]
    assert bool(decode.needs_page_soon(i32(scheduled), i32(pages), size, 2)[0]) == any(soon)


def test_growth_covers_the_horizon_and_a_page_to_begin_it():
    assert decode.growth_pages(0, 16) == 1
    assert decode.growth_pages(16, 16) == 2
    assert decode.growth_pages(17, 16) == 3


@given(st.integers(1, 100), st.integers(0, 50), st.integers(1, 16))
def test_pages_to_finish_hold_all_tokens_but_the_last(scheduled, more, size):
    have = -(-scheduled // size)
    max_len = scheduled + 1 + more
    got = decode.pages_to_finish(i32(scheduled), i32(max_len), i32(have), size)
    assert got == -(-(max_len - 1) // size) - have


def test_pages_to_finish_is_the_largest_of_all_rows_and_none_without_rows():
    assert decode.pages_to_finish(i32(4, 4), i32(9, 33), i32(1, 1), 4) == 7
    assert decode.pages_to_finish(i32(), i32(), i32(), 4) == 0


def test_the_margin_caps_the_way_to_the_end():
    assert decode.admission_margin(3, 2, 100, 8) == 14
    assert decode.admission_margin(0, 2, 0, 8) == 0


def test_promised_pages_are_no_room():
    assert decode.booking_room(free=4, evictable=5, promised=7) == 2


def victims(**columns):
    n = len(next(iter(columns.values())))
    values = {
        name: np.asarray(columns.get(name, [0] * n), np.int64)
        for name in ("priority", "produced", "num_pages", "preempts", "arrival")
    }
    return decode.victim_order(max_preempts=3, **values).tolist()


def test_victims_are_of_the_lowest_class_then_those_who_produced_least():
    assert victims(priority=[0, 1, 1], produced=[0, 9, 2]) == [2, 1, 0]


def test_between_equals_the_larger_then_the_younger_goes():
    assert victims(num_pages=[1, 5, 5], arrival=[9, 1, 2]) == [2, 1, 0]


def test_pinned_rows_are_chosen_only_after_all_others():
    assert victims(preempts=[3, 2, 4], produced=[0, 50, 1]) == [1, 0, 2]
