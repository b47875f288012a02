import pytest

from engine.cache.hit import PAGES, ReuseKind, ReuseRule
from engine.stage import Stage, next_stage

RULE = ReuseRule(kind=ReuseKind.REPLAY, replay_tokens=8)


@pytest.mark.parametrize(
    ("hits", "held", "stage"),
    [
        ((), 0, Stage(0, 50)),
        ((20,), 20, Stage(12, 50, 12, 20)),
        ((20, 32), 32, Stage(24, 50, 24, 32)),
        # The hit is gone: it is computed first, then replayed.
        ((20, 32), 0, Stage(0, 20)),
        ((20, 32), 20, Stage(12, 32, 12, 20)),
    ],
)
def test_a_stage_ends_at_the_next_hit_or_at_the_goal(hits, held, stage):
    assert next_stage(RULE, hits, held, 50) == stage


@pytest.mark.parametrize("held", [0, 16])
def test_without_replay_computing_goes_on_where_pages_end(held):
    assert next_stage(PAGES, (), held, 50) == Stage(start=held, end=50)
