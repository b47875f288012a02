"""Prompts with images, cut into chunks step by step: no border lies inside an image, and everybody gets done."""

import hashlib
import random

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from core.image_plan import ImageRules
from core.request import MmItem
from engine.images import ImageFacts, spans_of
from engine.scheduler.prefill import share_budget, split_budget
from tests.fakes.engine_rig import Facts, Rig
from tests.fakes.engine_traffic import Traffic

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


# The same under the whole scheduler, with caching, retraction and hand-overs.

IMAGE = 95
FACTS = ImageFacts(token_id=IMAGE, rules=ImageRules(patch=1, downsample=1, max_tokens=LARGEST, min_pixels=0))


class ImageRig(Rig):
    """Looks at every border of a chunk."""

    overdraw = LARGEST

    def __init__(self, **settings):
        super().__init__(**settings)
        self.moved = self.shown = 0
        self.of_row = {}

    def _check_plan(self, plan):
        super()._check_plan(plan)
        rows = self.holdings.rows
        for init in plan.extra.inits:
            start = plan.seq_start[plan.rows.tolist().index(init.row)]
            assert all(item.end > start for item in init.images), "pixels of an image that is computed already"
            self.of_row[init.row] = {item.digest for item in init.images}
            self.shown += len(init.images)
        for i in np.flatnonzero(plan.use_next == 0).tolist():
            seq = self.holdings.sequences[int(rows.seq[plan.rows[i]])]
            start, end = int(plan.seq_start[i]), int(plan.seq_start[i] + plan.q_start[i + 1] - plan.q_start[i])
            assert not cuts(end, int(rows.stage_end[plan.rows[i]]), spans_of(seq.request))
            inside = [item for item in seq.request.mm_items if item.start < end and item.end > start]
            assert {item.digest for item in inside} <= self.of_row[int(plan.rows[i])], (
                "an image is computed whose pixels never came"
            )
            self.moved += end < int(rows.stage_end[plan.rows[i]]) and end % self.config.page_tokens != 0


class ImageTraffic(Traffic):
    """Prompts whose stems have images at fixed places."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.items = {}
        for stem in self._stems:
            at = self.random.randrange(6)
            while at + LARGEST < len(stem):
                height, width = self.random.choice(((1, 2), (2, 4), (1, 5), (3, 1)))
                count = height * (width + 1) + 2
                digest = hashlib.sha256(repr((stem, at)).encode()).digest()
                item = MmItem(
                    digest=digest,
                    start=at,
                    end=at + count,
                    height=height,
                    width=width,
                    pixels=bytes(3 * height * width),
                )
                stem[at : item.end] = [IMAGE] * count
                self.items.setdefault(id(stem), []).append(item)
                at = item.end + self.random.choice((0, 0, 1, 5))

    def prompt(self):
        stem = self.random.choice(self._stems)
        shared = self.random.randrange(self.longest)
        items = self.items.get(id(stem), [])
        shared = next((item.start for item in items if item.start < shared < item.end), shared)
        self.chosen = tuple(item for item in items if item.end <= shared)
        tail = [self.random.randrange(90) for _ in range(self.random.randrange(6))]
        return (stem[:shared] + tail)[: max(self.longest, shared)] or [1]

    def request(self, prompt):
        return msgspec.structs.replace(super().request(prompt), mm_items=self.chosen)


@pytest.mark.parametrize("seed", range(10))
def test_traffic_with_images_is_right_cuts_none_and_sticks_nowhere(seed, monkeypatch):
    monkeypatch.setattr(Facts, "images", FACTS)
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4, 8))
    rig = ImageRig(
        page_tokens=size,
        num_pages=rng.choice((120, 160)) // size,
        num_rows=rng.choice((2, 4, 8)),
        chunk_tokens=max(size, rng.choice((4, 8, 12, 24))),
        horizon_tokens=rng.choice((0, 4)),
        max_partial_prefills=rng.choice((1, 2, 4)),
    )
    traffic = ImageTraffic(rig, seed, longest=60, max_outputs=16)
    for _ in range(40):
        traffic.step()
    traffic.drain()
    assert traffic.refused == 0
    assert rig.shown > 3
    assert rig.moved or size == 1
