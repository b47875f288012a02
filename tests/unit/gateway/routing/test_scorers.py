import numpy as np
import pytest

from gateway.fleet import Fleet
from gateway.routing.job import Job, RoutingRules
from gateway.routing.scorers import compute_seconds

RULES = RoutingRules(prefill_tokens_per_s=1000.0, base_s=0.0, quadratic_s=0.0)


@pytest.mark.parametrize(("matched", "tokens"), [(0, 1000), (100, 1000), (128, 1000), (600, 528), (1000, 128)])
def test_a_cached_prefix_saves_what_is_not_replayed_behind_it(matched, tokens):
    fleet = Fleet.empty(2)
    fleet.replay_tokens[1] = 128
    job = Job(model=1, num_tokens=1000, max_output=1, matched=np.zeros(2, np.int64))
    slots, held = np.array([0, 1]), np.array([matched, matched])
    plain, replaying = compute_seconds(fleet, slots, job, held, RULES)
    assert replaying == pytest.approx(tokens / 1000)
    assert plain == pytest.approx(max(1000 - matched, 1) / 1000)
