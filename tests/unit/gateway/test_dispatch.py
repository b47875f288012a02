import pytest

from core.clock import ManualClock
from core.worker import Role
from gateway.directory import Directory
from gateway.dispatch import Dispatch, decay_recent
from tests.fakes.cluster import load, registration


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def directory(clock):
    return Directory(clock)


def member(directory, worker_id, role):
    found, _ = directory.join(registration(worker_id, role))
    directory.heartbeat(found, load())
    return found


def own(directory):
    fleet = directory.fleet
    return fleet.own_tokens[:3].tolist(), fleet.own_requests[:3].tolist()


def test_work_is_counted_at_both_workers_and_given_back_once(directory):
    prefill, decode = member(directory, "p", Role.PREFILL), member(directory, "d", Role.DECODE)
    dispatch = Dispatch(directory, prefill=prefill, decode=decode, tokens=100, seconds=1.0)
    assert own(directory) == ([100, 0, 0], [0, 1, 0])
    dispatch.computed()
    dispatch.computed()
    assert own(directory) == ([0, 0, 0], [0, 1, 0])
    dispatch.close()
    dispatch.close()
    assert own(directory) == ([0, 0, 0], [0, 0, 0])


def test_placing_elsewhere_moves_the_tokens(directory):
    first, decode = member(directory, "p", Role.PREFILL), member(directory, "d", Role.DECODE)
    second = member(directory, "q", Role.PREFILL)
    dispatch = Dispatch(directory, prefill=first, decode=decode, tokens=100, seconds=1.0)
    dispatch.place(second, seconds=1.0)
    assert own(directory) == ([0, 0, 100], [0, 1, 0])
    dispatch.place(None, seconds=1.0)
    assert own(directory) == ([0, 100, 0], [0, 1, 0])
    dispatch.close()
    assert own(directory) == ([0, 0, 0], [0, 0, 0])


def test_a_worker_that_died_takes_its_figures_along_and_its_slot_stays_clean(directory):
    prefill, decode = member(directory, "p", Role.PREFILL), member(directory, "d", Role.DECODE)
    dispatch = Dispatch(directory, prefill=prefill, decode=decode, tokens=100, seconds=1.0)
    directory.deregister(prefill)
    directory.deregister(decode)
    member(directory, "x", Role.PREFILL)
    dispatch.close()
    assert own(directory) == ([0, 0, 0], [0, 0, 0])


def test_a_probe_whose_client_left_does_not_stay_out(directory, clock):
    prefill, decode = member(directory, "p", Role.PREFILL), member(directory, "d", Role.DECODE)
    for _ in range(3):
        clock.advance(0.3)
        directory.failed(decode)
    dispatch = Dispatch(directory, prefill=prefill, decode=decode, tokens=1, seconds=0.0)
    assert decode.breaker.probing
    dispatch.close()
    assert not decode.breaker.probing


def test_a_probe_that_was_placed_elsewhere_does_not_stay_out(directory, clock):
    first, decode = member(directory, "p", Role.PREFILL), member(directory, "d", Role.DECODE)
    second = member(directory, "q", Role.PREFILL)
    for _ in range(3):
        clock.advance(0.3)
        directory.failed(first)
    dispatch = Dispatch(directory, prefill=first, decode=decode, tokens=1, seconds=0.0)
    assert first.breaker.probing
    dispatch.place(second, seconds=0.0)  # it refused: it was busy, or its lease had lapsed
    dispatch.computed()
    dispatch.close()
    assert first.breaker.permits(clock.now() + 60.0)


def test_long_term_load_halves_in_a_minute(directory):
    prefill, decode = member(directory, "p", Role.PREFILL), member(directory, "d", Role.DECODE)
    Dispatch(directory, prefill=prefill, decode=decode, tokens=1, seconds=8.0).close()
    decay_recent(directory, 60.0)
    assert directory.fleet.recent_s[prefill.slot] == pytest.approx(4.0)
