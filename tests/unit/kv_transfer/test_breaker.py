"""When a failing peer is left alone, and how it comes back."""

from core.clock import ManualClock
from kv_transfer.breaker import Breaker, BreakerState


def make():
    clock = ManualClock()
    return clock, Breaker(clock, failures=3, min_s=0.5, max_s=2.0)


def fail(breaker, times):
    for _ in range(times):
        breaker.failed()


def test_one_failure_never_opens_it_and_a_success_forgets():
    _, breaker = make()
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.allow()


def test_it_opens_after_three_in_a_row_and_lets_one_trial_through_later():
    clock, breaker = make()
    fail(breaker, 3)
    assert not breaker.allow()
    assert breaker.retry_after_s == 0.5
    clock.advance(0.5)
    assert breaker.allow()
    assert not breaker.allow(), "one trial at a time"
    breaker.succeeded()
    assert breaker.allow()
    assert breaker.allow()


def test_failed_trials_double_the_pause_up_to_a_bound():
    clock, breaker = make()
    fail(breaker, 3)
    for pause in (0.5, 1.0, 2.0, 2.0):
        clock.advance(pause - 0.01)
        assert not breaker.allow()
        clock.advance(0.01)
        assert breaker.allow()
        breaker.failed()


def test_failures_of_older_calls_do_not_prolong_the_pause():
    clock, breaker = make()
    fail(breaker, 3)
    clock.advance(0.4)
    breaker.failed()
    clock.advance(0.1)
    assert breaker.allow()


def test_a_trial_without_a_verdict_makes_room_for_the_next():
    clock, breaker = make()
    fail(breaker, 3)
    clock.advance(0.5)
    assert breaker.allow()
    breaker.undecided()
    assert breaker.allow()
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_breaker_is_forgotten_when_nobody_needs_what_it_knows():
    """Workers come and go under new addresses: the table of breakers must not grow with them."""
    clock, breaker = make()
    assert not breaker.is_forgettable
    for _ in range(3):
        breaker.failed()
    clock.advance(2.0)
    assert not breaker.is_forgettable
    clock.advance(1000.0)
    assert breaker.is_forgettable
    assert breaker.allow()
    assert not breaker.is_forgettable, "its one trial is under way"
    breaker.succeeded()
    clock.advance(1000.0)
    assert breaker.is_forgettable
