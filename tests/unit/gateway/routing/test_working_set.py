import numpy as np

from gateway.routing.working_set import PATIENCE_S, WorkingSet


def test_sessions_enter_while_their_contexts_fit_and_wait_in_order_after_that():
    known = WorkingSet(1.0)
    assert known.begin(1, 400, 1000, 0.0)
    assert known.begin(2, 400, 1000, 0.0)
    assert not known.begin(3, 400, 1000, 0.0)
    assert not known.begin(4, 100, 1000, 0.1)  # it would fit, but it came later
    assert (known.live, known.waiting) == (2, 2)
    known.end(1, 400, 1.0)
    after = 1.0 + known.pause_s
    for now in np.arange(1.0, after, PATIENCE_S / 2):
        assert not known.begin(3, 400, 1000, now)
        assert not known.begin(4, 100, 1000, now)
    assert known.begin(3, 400, 1000, after)
    assert not known.begin(4, 100, 1000, after)  # it would grow to what contexts are
    assert known.begin(4, 100, 1300, after)


def test_running_sessions_go_on_however_full_it_is():
    known = WorkingSet(1.0)
    assert known.begin(1, 900, 1000, 0.0)
    known.end(1, 950, 1.0)
    assert known.begin(1, 5000, 1000, 2.0)
    assert not known.begin(2, 10, 1000, 2.0)


def test_the_first_session_enters_though_it_fits_nowhere():
    assert WorkingSet(1.0).begin(1, 5000, 1000, 0.0)


def test_a_session_that_was_silent_too_long_comes_back_without_waiting():
    known = WorkingSet(1.0)
    assert known.begin(1, 900, 1000, 0.0)
    known.end(1, 900, 1.0)
    late = 2.0 + known.pause_s
    assert known.begin(2, 900, 1000, late)
    assert known.begin(1, 950, 1000, late + 1)


def test_who_stops_asking_loses_its_place():
    known = WorkingSet(1.0)
    known.begin(1, 900, 1000, 0.0)
    assert not known.begin(2, 900, 1000, 0.0)
    known.end(1, 900, 0.0)
    later = known.pause_s
    assert later > PATIENCE_S
    assert known.begin(3, 900, 1000, later)


def test_young_sessions_count_as_what_contexts_grow_to():
    known = WorkingSet(1.0)
    known.begin(1, 400, 1000, 0.0)
    known.end(1, 600, 1.0)
    assert not known.begin(2, 100, 1000, 1.0)
    assert known.begin(2, 100, 1300, 1.0)


def test_pauses_are_learned_as_a_high_quantile():
    known = WorkingSet(1.0)
    now = 0.0
    for turn in range(4000):
        assert known.begin(1, 10, 1000, now)
        known.end(1, 10, now)
        now += 1.0 if turn % 10 else 8.0
    assert 1.0 <= known.pause_s <= 12.0


def test_clients_that_name_every_request_a_session_are_not_held():
    known, now, held = WorkingSet(1.0), 0.0, []
    for session in range(400):
        while not known.begin(session, 100, 1000, now):
            now += 1.0
        known.end(session, 100, now)
        held.append(now)
        now += 0.1
    assert held[-1] - held[-50] < 50 * 0.2
    assert held[30] - held[0] > 30  # until that was learned they were
