import random

import pytest

from gateway.fleet import Fleet
from gateway.routing.calibration import ENOUGH, LinkCosts, PrefillCosts

TRUTH = (0.02, 1 / 12_000, 1.2e-9)


def fleet_of(*kinds):
    fleet = Fleet.empty(4)
    for slot, kind in enumerate(kinds):
        fleet.used[slot] = True
        fleet.kind[slot] = kind
    return fleet


def seconds(tokens, context):
    return TRUTH[0] + TRUTH[1] * tokens + TRUTH[2] * tokens * (context - tokens / 2)


def feed(costs, fleet, slot, count, rng, noise=0.0):
    for _ in range(count):
        context = int(10 ** rng.uniform(2.0, 5.1))
        tokens = rng.randrange(50, context)
        costs.observe(fleet, slot, tokens, context, seconds(tokens, context) * rng.gauss(1, noise))


def predicted(fleet, slot, tokens, context):
    return fleet.base_s[slot] + fleet.token_s[slot] * tokens + fleet.square_s[slot] * tokens * (context - tokens / 2)


def test_the_cost_of_prompts_is_found_whatever_was_assumed():
    fleet, costs = fleet_of(1), PrefillCosts()
    feed(costs, fleet, 0, 200, random.Random(1))
    for tokens, context in ((100, 200), (3_000, 80_000), (60_000, 60_000)):
        assert predicted(fleet, 0, tokens, context) == pytest.approx(seconds(tokens, context), rel=0.02)


def test_noise_is_averaged_and_one_stall_changes_little():
    fleet, costs = fleet_of(1), PrefillCosts()
    feed(costs, fleet, 0, 400, random.Random(2), noise=0.3)
    before = predicted(fleet, 0, 8_000, 20_000)
    costs.observe(fleet, 0, 8_000, 20_000, 600.0)
    assert predicted(fleet, 0, 8_000, 20_000) == pytest.approx(before, rel=0.15)
    assert before == pytest.approx(seconds(8_000, 20_000), rel=0.2)


def test_a_change_of_the_machine_is_followed():
    fleet, costs = fleet_of(1), PrefillCosts()
    rng = random.Random(3)
    feed(costs, fleet, 0, 300, rng)
    for _ in range(1500):
        tokens = rng.randrange(50, 20_000)
        costs.observe(fleet, 0, tokens, tokens, 3 * seconds(tokens, tokens))
    assert predicted(fleet, 0, 9_000, 9_000) == pytest.approx(3 * seconds(9_000, 9_000), rel=0.1)


def test_kinds_are_learned_apart_and_a_new_worker_of_a_kind_knows_at_once():
    fleet, costs = fleet_of(1, 1, 2), PrefillCosts()
    feed(costs, fleet, 0, ENOUGH - 1, random.Random(4))
    assert fleet.token_s.tolist() == [0, 0, 0, 0]
    feed(costs, fleet, 0, 50, random.Random(5))
    assert fleet.token_s[0] == fleet.token_s[1] > 0
    assert fleet.token_s[2] == 0
    fleet.kind[3] = 1
    costs.describe(fleet, 3)
    assert fleet.token_s[3] == fleet.token_s[0]


def test_equal_prompts_only_do_not_blow_the_fit_up():
    fleet, costs = fleet_of(1), PrefillCosts()
    for _ in range(20_000):
        costs.observe(fleet, 0, 1_000, 1_000, seconds(1_000, 1_000))
    feed(costs, fleet, 0, 200, random.Random(6))
    assert predicted(fleet, 0, 30_000, 60_000) == pytest.approx(seconds(30_000, 60_000), rel=0.05)


def test_link_costs_follow_what_bytes_added_within_and_between_domains():
    link = LinkCosts()
    for _ in range(100):
        link.observe(tokens=1000, num_bytes=1_000_000, seconds=0.01, far=False)
        link.observe(tokens=1000, num_bytes=1_000_000, seconds=0.5, far=True)
    assert link.bytes_per_token == pytest.approx(1000)
    assert link.near_s == pytest.approx(1e-8, rel=0.01)
    assert link.far_s == pytest.approx(5e-7, rel=0.01)


@pytest.mark.parametrize("seed", range(8))
def test_noise_never_leads_the_fit_astray(seed):
    """Prompts of one shape first (nothing cached, so that the coefficients can hardly be told apart), then all kinds."""
    fleet, costs, rng = fleet_of(1), PrefillCosts(), random.Random(seed)
    ratios = []
    for number in range(600):
        context = int(10 ** rng.uniform(2.5, 5.0))
        tokens = context if number < 100 or rng.random() < 0.7 else rng.randrange(50, context)
        true = seconds(tokens, context)
        if number > 50:
            ratios.append(predicted(fleet, 0, tokens, context) / true)
        costs.observe(fleet, 0, tokens, context, true * max(0.1, rng.gauss(1, 0.3)))
    assert 0.85 < sorted(ratios)[len(ratios) // 2] < 1.15
    assert sorted(ratios)[len(ratios) // 20] > 0.5 and sorted(ratios)[-len(ratios) // 20] < 2.0


def test_a_worker_that_always_answers_at_once_is_never_thought_slow():
    """Rounding must not add up: for thousands of prompts with nothing to learn from, and a stall among them."""
    fleet, costs, rng = fleet_of(1), PrefillCosts(), random.Random(3)
    for number in range(12_000):
        context = rng.choice([rng.randint(8, 200), rng.randint(60, 500), rng.randint(500, 5000)])
        tokens = context if rng.random() < 0.6 else rng.randint(1, context)
        took = rng.choice([1e-6, 1e-5, 1e-4, 5e-4, 2e-3])
        costs.observe(fleet, 0, tokens, context, 2.0 if 6000 <= number < 6020 else took)
        if number > 200:
            assert predicted(fleet, 0, 5000, 5000) < 1.0, number
