"""In which steps one revision replaces another."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from deploy import rollout_plan
from deploy.rollout_plan import Step, rollout_steps

COUNTS = st.dictionaries(st.sampled_from(["prefill", "decode"]), st.integers(0, 40), min_size=1)


def check(want, surge):
    new, old = dict.fromkeys(want, 0), dict(want)
    for step in rollout_steps(want, surge):
        for role, size in want.items():
            assert new[role] <= step.new[role] <= size, "new workers only come"
            assert step.old[role] <= old[role], "old workers only leave"
            assert step.new[role] - new[role] <= surge, "no more than the surge at a time"
            assert step.new[role] + step.old[role] >= size, "the floor: never less than the whole pool"
        for left in (step.new, step.old):
            counts = [left[role] for role, size in want.items() if size]
            assert all(counts) or not any(counts), "a revision has both roles or none"
        new, old = step.new, step.old
    assert (dict(new), any(old.values())) == (want, False) or not any(want.values())


@given(COUNTS, st.integers(1, 5))
def test_capacity_stays_and_each_revision_can_serve_alone(want, surge):
    check(want, surge)


def test_the_property_finds_an_old_pool_that_is_rounded_down(monkeypatch):
    def mutant(want, surge):
        steps = max(want.values())
        return [
            Step(
                new={r: -(-n * i // steps) for r, n in want.items()},
                old={r: n * (steps - i) // steps for r, n in want.items()},
            )
            for i in range(1, steps + 1)
        ]

    monkeypatch.setattr(rollout_plan, "rollout_steps", mutant)
    monkeypatch.setitem(globals(), "rollout_steps", mutant)
    with pytest.raises(AssertionError, match="both roles or none"):
        check({"prefill": 1, "decode": 3}, 1)
