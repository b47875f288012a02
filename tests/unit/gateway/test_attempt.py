import pytest

from core.errors import (
    BadRequest,
    DeadlineExceeded,
    Draining,
    InvariantError,
    NeverFits,
    NoCapacity,
    NoWorker,
    TransferFailed,
    WorkerLost,
)
from gateway.attempt import (
    Again,
    GiveUp,
    Progress,
    RetryBudget,
    RetryRules,
    after_failure,
    after_shortage,
    count_failure,
    may_place,
)
from gateway.routing.job import Shortage

RULES = RetryRules()


def progress(**changes):
    return Progress(**({"started_at": 0.0, "deadline": 100.0, "attempts": 1} | changes))


def decide(error, state=None, *, by_worker=True, budget=None, now=1.0, rules=RULES):
    state = state or progress()
    count_failure(error, by_worker=by_worker, progress=state, rules=rules, now=now)
    return after_failure(
        error, by_worker=by_worker, progress=state, rules=rules, budget=budget or RetryBudget(rules), now=now
    )


@pytest.mark.parametrize("kind", [BadRequest, NeverFits])
def test_what_is_the_clients_fault_goes_to_the_client(kind):
    error = kind("no")
    assert decide(error) == GiveUp(error)


@pytest.mark.parametrize("kind", [NoCapacity, Draining, TransferFailed, WorkerLost, InvariantError])
def test_the_first_failure_of_a_worker_is_retried_at_once(kind):
    assert decide(kind("no")) == Again(0.0)


def test_pauses_grow_and_are_bounded_by_the_deadline():
    state, pauses = progress(deadline=1000.0), []
    for _ in range(5):
        pauses.append(decide(NoCapacity("busy"), state).pause_s)
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4]
    state = progress(deadline=1.01, failures=4)
    assert decide(NoCapacity("busy"), state).pause_s == pytest.approx(0.01)


def test_failures_in_a_row_are_bounded_and_capacity_keeps_its_name():
    state = progress()
    verdicts = [decide(NoCapacity("busy", retry_after_s=7.0), state) for _ in range(RULES.max_failures)]
    assert all(isinstance(verdict, Again) for verdict in verdicts[:-1])
    assert isinstance(verdicts[-1].error, NoCapacity)
    assert verdicts[-1].error.retry_after_s == 7.0


def test_a_request_under_which_workers_keep_dying_is_suspected():
    state = progress()
    verdicts = [decide(WorkerLost("gone"), state, by_worker=False) for _ in range(RULES.max_crashes)]
    assert isinstance(verdicts[-1], GiveUp)
    assert isinstance(verdicts[-1].error, WorkerLost)
    assert verdicts[-1].error.retry_after_s


def test_sound_attempts_in_between_start_the_count_again():
    state = progress()
    for _ in range(20):
        assert isinstance(decide(WorkerLost("gone"), state, by_worker=False), Again)
        state.received += RULES.steady_tokens


def test_a_few_tokens_between_crashes_do_not_clear_a_suspect():
    state, ends = progress(), []
    for _ in range(RULES.max_crashes):
        ends.append(decide(WorkerLost("gone"), state, by_worker=False))
        state.received += RULES.steady_tokens - 1
    assert isinstance(ends[-1], GiveUp)


def test_retries_of_answered_errors_draw_on_a_budget_that_requests_fill():
    rules = RetryRules(budget_burst=1.0, budget_share=0.5)
    budget = RetryBudget(rules)
    assert isinstance(decide(NoCapacity("busy"), budget=budget, rules=rules), Again)
    assert isinstance(decide(NoCapacity("busy"), budget=budget, rules=rules), GiveUp)
    budget.request()
    budget.request()
    assert isinstance(decide(NoCapacity("busy"), budget=budget, rules=rules), Again)


def test_lost_and_leaving_workers_and_resumes_need_no_budget():
    rules = RetryRules(budget_burst=0.0)
    budget = RetryBudget(rules)
    assert isinstance(decide(Draining("bye"), budget=budget, rules=rules), Again)
    assert isinstance(decide(WorkerLost("gone"), by_worker=False, budget=budget, rules=rules), Again)
    assert isinstance(decide(NoCapacity("busy"), progress(received=5), budget=budget, rules=rules), Again)


def test_nothing_is_tried_after_the_deadline():
    verdict = decide(WorkerLost("gone"), progress(received=3), by_worker=False, now=100.0)
    assert isinstance(verdict.error, DeadlineExceeded)
    assert "3 output tokens" in verdict.error.message


def short(role="decode"):
    return Shortage(role=role, message="nobody")


def test_a_new_request_waits_briefly_then_learns_why():
    assert isinstance(after_shortage(short(), progress=progress(), rules=RULES, now=0.5), Again)
    verdict = after_shortage(short(), progress=progress(), rules=RULES, now=1.0)
    assert isinstance(verdict.error, NoWorker)
    assert verdict.error.retry_after_s
    verdict = after_shortage(short("capacity"), progress=progress(), rules=RULES, now=1.0)
    assert type(verdict.error) is NoCapacity


def test_a_resume_waits_long_counted_from_the_interruption():
    state = progress(received=4, interrupted_at=50.0)
    assert isinstance(after_shortage(short(), progress=state, rules=RULES, now=79.0), Again)
    verdict = after_shortage(short(), progress=state, rules=RULES, now=80.0)
    assert isinstance(verdict.error, WorkerLost)


def test_what_can_never_fit_is_told_at_once():
    verdict = after_shortage(short("fits"), progress=progress(), rules=RULES, now=0.0)
    assert isinstance(verdict.error, NeverFits)
    assert verdict.error.param == "prompt"


def test_waiting_ends_at_the_deadline():
    state = progress(received=4, interrupted_at=99.0)
    assert isinstance(after_shortage(short(), progress=state, rules=RULES, now=100.0).error, DeadlineExceeded)


def test_placements_are_bounded():
    assert may_place(progress(placements=2), RULES)
    assert not may_place(progress(placements=3), RULES)


def test_the_longer_an_outage_lasts_the_rarer_are_the_questions_but_never_past_the_deadline():
    state = progress(received=3, deadline=1000.0)
    state.interrupted_at = 0.0
    pauses = [after_shortage(short(), progress=state, rules=RULES, now=now).pause_s for now in (0.0, 1.0, 4.0, 25.0)]
    assert pauses == sorted(pauses)
    assert pauses[0] == RULES.pause_s
    assert pauses[-1] == RULES.longest_pause_s
    state.deadline = 25.25
    assert after_shortage(short(), progress=state, rules=RULES, now=25.0).pause_s == 0.25
