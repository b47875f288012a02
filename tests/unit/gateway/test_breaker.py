from gateway.breaker import Breaker, BreakerRules

RULES = BreakerRules(threshold=3, first_s=0.5, longest_s=4.0)


def failed(times, now=0.0):
    """A breaker that failed so often, the last time at `now`."""
    breaker = Breaker(RULES)
    for index in range(times):
        breaker.failed(now - times + 1 + index)
    return breaker


def test_failures_at_one_moment_count_once():
    breaker = Breaker(RULES)
    for _ in range(64):
        breaker.failed(0.0)
    assert breaker.failures == 1


def test_one_failure_never_opens():
    assert failed(1).permits(0.0)
    assert failed(2).permits(0.0)


def test_the_threshold_opens_for_the_first_quarantine():
    breaker = failed(3)
    assert not breaker.permits(0.49)
    assert breaker.permits(0.5)


def test_quarantine_doubles_up_to_its_bound():
    breaker = failed(3)
    spans = []
    now = 0.0
    for _ in range(6):
        spans.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.failed(now)
    assert spans == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_half_open_lets_exactly_one_probe_out():
    breaker = failed(3)
    assert breaker.permits(1.0)
    breaker.dispatched()
    assert not breaker.permits(1.0)


def test_a_probe_that_succeeds_closes_and_forgets():
    breaker = failed(3)
    breaker.dispatched()
    breaker.succeeded()
    breaker.failed(2.0)
    assert breaker.permits(2.0)


def test_a_probe_without_a_verdict_allows_the_next():
    breaker = failed(3)
    breaker.dispatched()
    breaker.undecided()
    assert breaker.permits(1.0)


def test_a_success_between_failures_starts_the_count_again():
    breaker = failed(2)
    breaker.succeeded()
    breaker.failed(1.0)
    breaker.failed(2.0)
    assert breaker.permits(2.0)


def test_what_was_sent_before_a_failure_failed_with_it_and_what_was_sent_after_counts_anew():
    breaker = Breaker(BreakerRules(threshold=3))
    breaker.failed(10.0, sent_at=9.0)
    for sent_at in (9.5, 10.0):
        breaker.failed(10.001, sent_at=sent_at)
    assert breaker.failures == 1
    for number in (1, 2):
        breaker.failed(10.0 + 0.002 * number, sent_at=10.0 + 0.002 * number - 0.001)
    assert breaker.failures == 3
    assert not breaker.permits(10.01)
