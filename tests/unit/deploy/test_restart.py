"""When an ended process starts again."""

from core.lifecycle import EXIT_PREFLIGHT
from deploy.local.restart import FIRST_DELAY_S, HEALTHY_AFTER_S, HOLD_AFTER_RESTARTS, MAX_DELAY_S, History, after_exit


def crash(history, now, started_at=None):
    return after_exit(
        history, exit_code=1, was_asked=False, started_at=now if started_at is None else started_at, now=now
    )


def test_a_process_that_was_asked_to_leave_is_removed_whatever_its_exit_code():
    verdict = after_exit(History(), exit_code=-9, was_asked=True, started_at=0, now=1)
    assert verdict.action == "remove"


def test_a_failed_preflight_is_held_at_once():
    verdict = after_exit(History(), exit_code=EXIT_PREFLIGHT, was_asked=False, started_at=0, now=1)
    assert (verdict.action, verdict.history.restarts) == ("hold", ())


def test_delays_double_and_are_bounded():
    history, delays, now = History(), [], 0.0
    for _ in range(30):
        verdict = crash(history, now)
        assert verdict.action == "restart"
        delays.append(verdict.delay_s)
        history, now = verdict.history, now + 700.0 if now else 1.0
        now += 3600.0
    assert delays[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert max(delays) == MAX_DELAY_S


def test_six_restarts_within_an_hour_hold_the_process():
    history, actions = History(), []
    for number in range(HOLD_AFTER_RESTARTS + 1):
        verdict = crash(history, float(number))
        history = verdict.history
        actions.append(verdict.action)
    assert actions == ["restart"] * HOLD_AFTER_RESTARTS + ["hold"]


def test_ten_minutes_of_health_forget_the_past():
    history = History(tuple(float(n) for n in range(5)), 32.0)
    verdict = crash(history, HEALTHY_AFTER_S + 10, started_at=5.0)
    assert (verdict.action, verdict.delay_s) == ("restart", FIRST_DELAY_S)
