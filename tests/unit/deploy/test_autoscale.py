"""The autoscaler's decision: step, ramp, burst, noise, stale figures, budget, link; and that it cannot thrash."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.autoscale_fluid import CONTROLLERS, run
from deploy.autoscale import decide as decide_module
from deploy.autoscale.decide import Memory, decide
from deploy.autoscale.needs import needs_of
from deploy.autoscale.signals import PoolCount, Rules, Signals

RULES = Rules(prefill_tokens_per_s=1000, decode_tokens_per_s=1000, kv_capacity_tokens=100_000)
TICK_S = 5.0


def signals(now, *, prefill=1, decode=1, **more):
    counts = {k: v if isinstance(v, PoolCount) else PoolCount(ready=v) for k, v in (("p", prefill), ("d", decode))}
    return Signals(now=now, prefill=counts["p"], decode=counts["d"], **more)


def follow(ticks, *, rules=RULES, prefill=1, decode=1, start_ticks=2, memory=None):
    """Apply every decision with a start time of `start_ticks`; return (prefill, decode) sizes after each tick."""
    memory = memory or Memory.fresh(-10_000.0)
    sizes, pending = [], []
    for number, more in enumerate(ticks):
        pending = [(at, role) for at, role in pending if at > number]
        starting = {role: sum(1 for _, r in pending if r == role) for role in "pd"}
        now = number * TICK_S
        seen = signals(
            now,
            prefill=PoolCount(ready=prefill - starting["p"], starting=starting["p"]),
            decode=PoolCount(ready=decode - starting["d"], starting=starting["d"]),
            **more,
        )
        decision, memory = decide(rules, memory, seen)
        pending += [(number + start_ticks, "p")] * max(0, decision.prefill.target - prefill)
        pending += [(number + start_ticks, "d")] * max(0, decision.decode.target - decode)
        prefill, decode = decision.prefill.target, decision.decode.target
        sizes.append((prefill, decode))
    return sizes


def test_a_step_of_load_is_met_at_once_and_kept():
    sizes = follow([{"inflow_uncached_tokens_per_s": 2300.0}] * 20)
    assert sizes[1][0] == 3  # 2300 / 800, after one tick that could have been a spike
    assert sizes[-1] == (3, 1)


def test_a_ramp_is_followed_without_a_step_back():
    up = [{"inflow_uncached_tokens_per_s": 50.0 * n} for n in range(1, 61)]
    sizes = [p for p, _ in follow(up)]
    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 2, 3, 4}, "one after the other, 3000 / 800 at the end"
    back = [p for p, _ in follow(up + up[::-1] + [{}] * 200)]
    assert sum(a < b for a, b in itertools.pairwise(back)) == 3
    assert sum(a > b for a, b in itertools.pairwise(back)) == 3, "each change once: no reversal"


def test_a_burst_is_met_and_kept_for_the_next_one():
    quiet, burst = [{"inflow_uncached_tokens_per_s": 500.0}] * 12, [{"inflow_uncached_tokens_per_s": 2300.0}] * 12
    sizes = [p for p, _ in follow(quiet + burst + quiet + burst)]
    assert sizes[: len(quiet)] == [1] * len(quiet)
    assert set(sizes[len(quiet) + 1 :]) == {3}, "a minute's pause is shorter than the window in which a pool shrinks"


def test_one_tick_of_noise_moves_nothing():
    quiet, spike = {"inflow_uncached_tokens_per_s": 500.0}, {"inflow_uncached_tokens_per_s": 5000.0}
    assert set(follow([quiet, quiet, spike, quiet, quiet, spike, quiet])) == {(1, 1)}


def test_a_pool_shrinks_one_worker_a_step_only_after_a_whole_quiet_window():
    busy, quiet = {"inflow_uncached_tokens_per_s": 3100.0}, {"inflow_uncached_tokens_per_s": 100.0}
    sizes = [p for p, _ in follow([busy] * 5 + [quiet] * 60)]
    first_drop = next(i for i in range(1, len(sizes)) if sizes[i] < sizes[i - 1])
    assert (first_drop - 4) * TICK_S >= RULES.prefill_down_window_s
    assert min(b - a for a, b in zip(sizes, sizes[1:], strict=False)) == -1
    assert sizes[-1] == 1


def test_decode_grows_with_the_kv_that_lives_and_waits():
    sizes = follow([{"live_kv_tokens": 150_000.0, "waiting_kv_tokens": 50_000.0}] * 5)
    assert sizes[-1][1] == 3  # 200k / 80k


def test_slow_tokens_with_room_in_memory_add_one_decode_worker_after_three_ticks():
    sizes = follow([{"tpot_p95_s": 0.3, "live_kv_tokens": 1000.0}] * 6)
    assert [d for _, d in sizes] == [1, 1, 1, 2, 2, 2]  # three ticks, and the one that rules out a spike; then anew


def test_stale_figures_hold_everything_even_down():
    decision, memory = decide(RULES, Memory.fresh(-10_000.0), signals(0.0, prefill=5, decode=5, age_s=16.0))
    assert (decision.prefill.target, decision.decode.target) == (5, 5)
    assert decision.prefill.reason == "stale"
    assert memory == Memory.fresh(-10_000.0)


def test_a_restarted_controller_does_not_shrink_before_one_window():
    memory = Memory.fresh(0.0)
    for tick in range(int(RULES.decode_down_window_s / TICK_S)):
        decision, memory = decide(RULES, memory, signals(tick * TICK_S, prefill=3, decode=3))
        assert decision.decode.target == 3
    decision, _ = decide(RULES, memory, signals(RULES.decode_down_window_s, prefill=3, decode=3))
    assert decision.decode.target == 2


def test_a_link_that_cannot_carry_more_holds_prefill():
    load = {"inflow_uncached_tokens_per_s": 5000.0, "kv_backlog_bytes": 1e9, "kv_bytes_per_s": 1e9}
    memory = Memory.fresh(-10_000.0)
    for tick in range(3):
        decision, memory = decide(RULES, memory, signals(tick * TICK_S, **load))
    assert (decision.prefill.target, decision.prefill.reason) == (1, "network_bound")


def test_decode_has_the_first_claim_on_a_short_budget():
    rules = msgspec.structs.replace(RULES, budget=5)
    load = {"inflow_uncached_tokens_per_s": 9000.0, "live_kv_tokens": 300_000.0}
    assert follow([load] * 6, rules=rules)[-1] == (1, 4)
    decision, _ = decide(rules, Memory.fresh(-10_000.0), signals(0.0, prefill=1, decode=4, **load))
    assert decision.over_budget


def test_a_draining_worker_still_counts_against_the_budget():
    rules = msgspec.structs.replace(RULES, budget=3)
    seen = signals(
        0.0,
        prefill=1,
        decode=PoolCount(ready=1, draining=1),
        live_kv_tokens=300_000.0,
        inflow_uncached_tokens_per_s=1.0,
    )
    decision, _ = decide(rules, Memory.fresh(-10_000.0), seen)
    assert decision.decode.target == 1


def test_needs_follow_their_formula():
    needs = needs_of(
        RULES,
        signals(
            0.0,
            inflow_uncached_tokens_per_s=800,
            queued_uncached_tokens=400,
            live_kv_tokens=80_000,
            output_tokens_per_s=850,
        ),
    )
    assert needs.prefill == pytest.approx((800 + 400 / 1.0) / 800)
    assert needs.decode_kv == pytest.approx(1.0)
    assert needs.decode_rate == pytest.approx(1.0)


def test_a_pool_without_free_rows_grows_although_its_kv_is_empty_and_its_output_cannot_rise():
    full = {"output_tokens_per_s": 850.0, "decode_rows": 4.0, "live_kv_tokens": 100.0}
    waiting = [{**full, "decode_requests": 12.0}] * 4
    assert follow(waiting)[-1] == (1, 4)
    assert follow([{**full, "decode_requests": 3.0}] * 4)[-1] == (1, 1)


load = st.fixed_dictionaries(
    {
        "inflow_uncached_tokens_per_s": st.floats(0, 20_000),
        "queued_uncached_tokens": st.floats(0, 50_000),
        "live_kv_tokens": st.floats(0, 2_000_000),
        "waiting_kv_tokens": st.floats(0, 500_000),
        "output_tokens_per_s": st.floats(0, 20_000),
        "decode_requests": st.floats(0, 500),
        "decode_rows": st.sampled_from([0.0, 32.0]),
        "tpot_p95_s": st.floats(0, 1),
        "age_s": st.sampled_from([0.0, 0.0, 0.0, 60.0]),
    }
)


def check_sizes(sizes, budget):
    before = (1, 1)
    for size in sizes:
        assert size[0] >= 1
        assert size[1] >= 1
        assert sum(size) <= budget
        assert size[0] >= before[0] - 1
        assert size[1] >= before[1] - 1
        before = size


@settings(max_examples=100, deadline=None)
@given(ticks=st.lists(load, min_size=1, max_size=60), budget=st.integers(2, 20))
def test_whatever_the_load_budget_and_minimum_hold_and_shrinking_is_single_steps(ticks, budget):
    check_sizes(follow(ticks, rules=msgspec.structs.replace(RULES, budget=budget)), budget)


def test_the_property_finds_a_planted_budget_mistake(monkeypatch):
    monkeypatch.setattr(decide_module, "_within_budget", lambda _r, _s, decode, prefill: (decode, prefill, False))
    with pytest.raises(AssertionError):
        check_sizes(
            follow([{"inflow_uncached_tokens_per_s": 20_000.0}] * 5, rules=msgspec.structs.replace(RULES, budget=4)), 4
        )


def test_in_the_fluid_hour_it_beats_a_static_pool_and_a_queue_length_rule():
    found = {name: run(CONTROLLERS[name], seed=0, budget=16) for name in CONTROLLERS}
    ours = found["tandem"]
    assert ours["in_slo"] > max(found[name]["in_slo"] for name in found if name != "tandem") + 0.05
    assert ours["worker_hours"] < found["static 2P3D"]["worker_hours"]
    assert ours["reversals"] < found["queue length, 300 s window"]["reversals"]
