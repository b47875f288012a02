"""Prompts with images, cut into chunks step by step: no border lies inside an image, and everybody gets done."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from engine.scheduler.prefill import share_budget, split_budget

PAGE = 4
LARGEST = 12


@st.composite
def prompts(draw):
    """(length, images) with images up to `LARGEST` tokens, some side by side."""
    spans, at = [], 0
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(2, LARGEST)), max_size=5)):
        spans.append((at + gap, at + gap + size))
        at += gap + size
    return at + draw(st.integers(1, 20)), spans


def cuts(border, length, spans):
    return border < length and any(low < border < high for low, high in spans)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(prompts(), min_size=1, max_size=4), st.integers(PAGE, 2 * LARGEST))
def test_no_border_lies_inside_an_image_and_the_oldest_always_goes_on(wanted, budget):
    done, goals, images = [0] * len(wanted), [length for length, _ in wanted], [spans for _, spans in wanted]
    while any(a < b for a, b in zip(done, goals, strict=True)):
        there = [i for i in range(len(wanted)) if done[i] < goals[i]]
        start = np.array([done[i] for i in there], np.int32)
        goal = np.array([goals[i] for i in there], np.int32)
        lengths = share_budget(start, goal, budget, PAGE, 0.25, images=[images[i] for i in there])
        assert lengths[0] > 0
        assert lengths.min() >= 0
        assert lengths.sum() <= budget or (lengths[0] <= LARGEST and lengths.sum() <= budget + LARGEST)
        for i, length in zip(there, lengths.tolist(), strict=True):
            done[i] += length
            assert done[i] <= goals[i]
            assert not cuts(done[i], goals[i], images[i])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(prompts(), min_size=1, max_size=4), st.integers(0, 3 * LARGEST))
def test_newcomers_stay_within_the_budget_unless_the_first_one_must_go_on(wanted, budget):
    start, goal = np.zeros(len(wanted), np.int32), np.array([length for length, _ in wanted], np.int32)
    images = [spans for _, spans in wanted]
    lengths = split_budget(start, goal, budget, PAGE, images)
    assert lengths.sum() <= budget
    assert not any(cuts(int(n), length, spans) for n, (length, spans) in zip(lengths, wanted, strict=True))
    urged = split_budget(start, goal, budget, PAGE, images, first_goes_on=True)
    assert urged[0] > 0 or budget < min(PAGE, goal[0])
    assert urged.sum() <= budget or urged[0] <= LARGEST


def chunk(start, goal, budget, spans, **how):
    return split_budget(np.array([start], np.int32), np.array([goal], np.int32), budget, PAGE, [spans], **how).tolist()


def test_a_border_inside_an_image_moves_behind_it_if_there_is_room_else_before_it():
    spans = [(6, 11)]
    assert chunk(0, 40, 11, spans) == [11]
    assert chunk(0, 40, 10, spans) == [6]
    assert chunk(6, 40, 4, spans) == [0]
    assert chunk(6, 40, 4, spans, first_goes_on=True) == [5]


def test_a_start_inside_an_image_goes_to_its_end():
    assert chunk(8, 40, 4, [(6, 13)], first_goes_on=True) == [5]


def test_a_prompt_that_ends_inside_nothing_and_borders_outside_images_stay_where_they_were():
    assert chunk(0, 40, 18, [(2, 7)]) == [16]
    assert chunk(0, 18, 18, [(2, 7)]) == [18]
