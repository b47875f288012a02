import numpy as np
import pytest

from engine.events import SeqId
from engine.plan import UNLIMITED, Plan, StepResult
from engine.scheduler.draft_book import EXPLORE_EVERY, DraftBook
from engine.scheduler.row_table import RowState, RowTable

K = 3
EVERY = np.ones(2, np.bool_)
BOTH = np.array([0, 1])


@pytest.fixture
def rows():
    table = RowTable(2, 4, 64)
    for seq in (1, 2):
        table.take(SeqId(seq), RowState.RUNNING)
    return table


@pytest.fixture
def book(rows):
    return DraftBook(rows, K, by_confidence=True)


def step(rows, *, confidences=None, drafted=(0, 0), count=(1, 1), computed=2, seconds=1.0):
    plan = Plan(
        step=1,
        rows=np.array([0, 1], np.int32),
        gens=rows.generation.copy(),
        q_start=np.array([0, 1, 2], np.int32),
        seq_start=np.zeros(2, np.int32),
        use_next=np.ones(2, np.uint8),
        sample=np.ones(2, np.uint8),
        tokens=np.zeros(2, np.int32),
        table_deltas=np.zeros((0, 3), np.int32),
    )
    result = StepResult(
        step=1,
        tokens=np.zeros((2, 1 + K), np.int32),
        count=np.array(count, np.int32),
        forward_s=seconds,
        drafted=np.array(drafted, np.int32),
        confidences=None if confidences is None else np.array(confidences, np.float32),
        computed=computed,
    )
    return plan, result, EVERY


def width(drafts):
    return np.array([1 + drafts, 1 + drafts], np.int32)


def timed(book, rows, **step_fields):
    """Steps of two tokens take 1 s, those of eight 1.6 s: a draft costs 0.1 s."""
    book.note(*step(rows, computed=8, seconds=1.6, **step_fields))
    book.note(*step(rows, computed=2, seconds=1.0, **step_fields))


def test_without_times_there_is_no_budget(book, rows):
    book.note(*step(rows, confidences=[[0.1] * K] * 2))
    assert book.budget(BOTH, width(K), 8) == UNLIMITED


def test_static_speculation_has_none_either(rows):
    book = DraftBook(rows, K, by_confidence=False)
    timed(book, rows, confidences=[[0.1] * K] * 2)
    assert book.budget(BOTH, width(K), 8) == UNLIMITED


def test_drafts_that_will_hardly_survive_are_not_worth_their_time(book, rows):
    timed(book, rows, confidences=[[0.9, 0.9, 0.01], [0.02, 0.9, 0.9]])
    assert book.budget(BOTH, width(K), 8) == 2


def test_a_row_that_nobody_heard_of_counts_as_certain(book, rows):
    timed(book, rows, confidences=[[0.01] * K, [0.01] * K])
    assert book.budget(BOTH, width(K), 8) == 0
    rows.release(1, 0)
    rows.take(SeqId(3), RowState.RUNNING)
    assert book.budget(BOTH, width(K), 8) == K


def test_a_budget_never_counts_drafts_that_the_plan_has_no_room_for(book, rows):
    timed(book, rows, confidences=[[1.0] * K, [1.0] * K])
    assert book.budget(BOTH, np.array([2, 1], np.int32), 3) == 1


def test_wide_steps_are_tried_again_now_and_then(book, rows):
    timed(book, rows, confidences=[[0.01] * K] * 2)
    budgets = [book.budget(BOTH, width(K), 8) for _ in range(2 * EXPLORE_EVERY)]
    assert budgets.count(UNLIMITED) == 2
    assert budgets.count(0) == len(budgets) - 2


def test_accepted_drafts_are_counted_by_their_place(book, rows):
    book.note(*step(rows, drafted=(3, 2), count=(3, 1)))
    book.note(*step(rows, drafted=(0, 3), count=(1, 4)))
    assert book.statistics() == {
        "drafts_verified": 8,
        "drafts_accepted": 5,
        "drafts_accepted_at_0": 2,
        "drafts_accepted_at_1": 2,
        "drafts_accepted_at_2": 1,
    }
