import pytest

from core.clock import ManualClock
from core.errors import NamespaceMismatch, NoCapacity
from core.ids import WorkerId
from core.lifecycle import State
from core.worker import Role
from gateway.directory import Directory
from gateway.dispatch import queue_prompt, unqueue_prompt
from gateway.routing import filters
from tests.fakes.cluster import MODEL, load, registration


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def directory(clock):
    return Directory(clock)


def joined(directory, worker_id="d1", role=Role.DECODE, **changes):
    member, _ = directory.join(registration(worker_id, role, **changes))
    directory.heartbeat(member, load())
    return member


def routable(directory, clock):
    mask = filters.alive(directory.fleet, directory.names.models.find(MODEL), clock.now())
    return sorted(directory.at(int(slot)).worker_id for slot in mask.nonzero()[0])


def test_a_registered_worker_is_routable_only_after_it_says_ready(directory, clock):
    member, _ = directory.join(registration("d1", Role.DECODE))
    assert routable(directory, clock) == []
    directory.heartbeat(member, load(state=State.WARMING))
    assert routable(directory, clock) == []
    directory.heartbeat(member, load())
    assert routable(directory, clock) == ["d1"]


def test_a_silent_worker_is_unroutable_at_its_ttl_and_gone_at_the_next_sweep(directory, clock):
    member = joined(directory)
    clock.advance(2.9)
    assert routable(directory, clock) == ["d1"]
    clock.advance(0.1)
    assert routable(directory, clock) == []
    assert directory.expire() == [member]
    assert not member.alive
    assert directory.find(WorkerId("d1")) is None


def test_a_busy_worker_that_heartbeats_is_never_removed(directory, clock):
    member = joined(directory)
    for _ in range(50):
        clock.advance(2.5)
        directory.heartbeat(member, load(waiting_tokens=10**9))
        assert directory.expire() == []


def test_a_broken_stream_stops_new_work_at_once_and_a_rejoin_restores_it(directory, clock):
    member = joined(directory)
    directory.disconnected(member)
    assert routable(directory, clock) == []
    again, replaced = directory.join(registration("d1", Role.DECODE))
    assert again is member and replaced is None
    assert routable(directory, clock) == ["d1"]


def test_a_restart_after_a_crash_replaces_the_old_incarnation(directory):
    member = joined(directory)
    directory.disconnected(member)
    new, replaced = directory.join(registration("d1", Role.DECODE, incarnation="d1-b"))
    assert replaced is member and not member.alive
    assert directory.find(WorkerId("d1")) is new


def test_a_second_live_process_of_the_same_name_is_refused(directory):
    joined(directory)
    with pytest.raises(NoCapacity, match="already uses the name 'd1'"):
        directory.join(registration("d1", Role.DECODE, incarnation="d1-b"))


def test_a_foreign_fingerprint_is_refused_with_both_named(directory):
    joined(directory)
    with pytest.raises(NamespaceMismatch, match=r"'p1' has fingerprint .* 'd1' serves"):
        directory.join(registration("p1", Role.PREFILL, revision="other"))


def test_a_worker_that_was_alone_may_come_back_with_new_weights(directory):
    member = joined(directory)
    directory.disconnected(member)
    directory.join(registration("d1", Role.DECODE, incarnation="d1-b", revision="r2"))


def test_mixed_fingerprints_form_groups_when_allowed(clock):
    directory = Directory(clock, mixed_fingerprints=True)
    one = joined(directory, "d1")
    two = joined(directory, "d2", revision="r2")
    assert directory.fleet.fingerprint[one.slot] != directory.fleet.fingerprint[two.slot]


def test_deregistered_and_draining_workers_get_no_new_work(directory, clock):
    one, two = joined(directory, "d1"), joined(directory, "d2")
    directory.draining(one)
    assert routable(directory, clock) == ["d2"]
    directory.deregister(two)
    assert routable(directory, clock) == []


def test_three_failures_quarantine_a_worker_and_a_success_frees_it(directory, clock):
    member = joined(directory)
    for _ in range(3):
        clock.advance(0.3)
        directory.failed(member)
    assert routable(directory, clock) == []
    clock.advance(0.5)
    directory.heartbeat(member, load())
    assert routable(directory, clock) == ["d1"]
    directory.dispatched(member)
    assert routable(directory, clock) == []
    directory.succeeded(member)
    assert routable(directory, clock) == ["d1"]


def test_a_flapping_worker_is_quarantined_longer_and_longer(directory, clock):
    spans = []
    for turn in range(6):
        member = joined(directory, incarnation=f"d1-{turn}")
        spans.append(member.breaker.open_until - clock.now())
        clock.advance(0.3)
        directory.disconnected(member)
    assert [round(span, 3) for span in spans[3:]] == [0.5, 1.0, 2.0]


def test_the_breaker_of_a_name_not_seen_for_long_is_forgotten(directory, clock):
    member = joined(directory)
    for _ in range(5):
        clock.advance(0.3)
        directory.failed(member)
    directory.deregister(member)
    clock.advance(601.0)
    directory.expire()
    assert joined(directory, incarnation="d1-b").breaker.failures == 0


def test_slots_are_reused_clean_and_grow_beyond_the_first_sixteen(directory):
    members = [joined(directory, f"d{index}") for index in range(40)]
    assert sorted(member.slot for member in members) == list(range(40))
    directory.fleet.own_requests[members[3].slot] = 7
    directory.deregister(members[3])
    assert joined(directory, "new").slot == members[3].slot
    assert directory.fleet.own_requests[members[3].slot] == 0


def test_of_a_report_only_what_is_not_ours_is_new(directory):
    member = joined(directory, "p1", Role.PREFILL)
    fleet, slot = directory.fleet, member.slot
    queue_prompt(directory, member, "receipt", 500, 0.5)
    directory.heartbeat(member, load(waiting_tokens=200, running_requests=1))
    assert fleet.foreign_tokens[slot] == 0.0
    directory.heartbeat(member, load(waiting_tokens=700, running_requests=3))
    assert (fleet.foreign_tokens[slot], fleet.foreign_requests[slot]) == (200.0, 3.0)
    unqueue_prompt(directory, member, "receipt", 500)
    assert (fleet.own_tokens[slot], fleet.own_s[slot], fleet.own_prompts[slot]) == (0.0, 0.0, 0.0)


def test_the_queue_of_our_own_prompts_shrinks_while_the_first_is_computed(directory, clock):
    member = joined(directory, "p1", Role.PREFILL)
    queue_prompt(directory, member, "a", 100, 1.0)
    queue_prompt(directory, member, "b", 200, 2.0)
    waits = []
    for elapsed in (0.0, 0.4, 5.0):
        clock.advance(elapsed)
        waits.append(float(directory.fleet.own_queue_s(clock.now())[member.slot]))
    # However late the first is, the second needs its time.
    assert waits == pytest.approx([3.0, 2.6, 2.0])
    unqueue_prompt(directory, member, "a", 100)
    assert directory.fleet.own_queue_s(clock.now())[member.slot] == pytest.approx(2.0)


def test_a_suspect_gets_no_new_work_before_its_next_heartbeat(directory, clock):
    member = joined(directory)
    directory.suspect(member)
    assert routable(directory, clock) == []
    directory.heartbeat(member, load())
    assert routable(directory, clock) == ["d1"]


def test_a_suspect_whose_stream_stands_still_owns_its_name(directory):
    directory.suspect(joined(directory))
    with pytest.raises(NoCapacity):
        directory.join(registration("d1", Role.DECODE, incarnation="d1-b"))


def test_a_renewed_registration_of_one_incarnation_keeps_its_load(directory, clock):
    member = joined(directory)
    clock.advance(2.0)
    directory.join(registration("d1", Role.DECODE))
    clock.advance(2.0)
    assert directory.expire() == []
    assert member.load is not None


def test_a_group_of_ranks_takes_work_only_while_all_of_it_does(directory, clock):
    ranks = [joined(directory, f"p{n}", Role.PREFILL, group_id="g", dp_rank=n, dp_size=3) for n in range(2)]
    joined(directory, "alone", Role.PREFILL, group_id="other", dp_size=1)
    assert routable(directory, clock) == ["alone"]
    ranks.append(joined(directory, "p2", Role.PREFILL, group_id="g", dp_rank=2, dp_size=3))
    assert routable(directory, clock) == ["alone", "p0", "p1", "p2"]
    directory.heartbeat(ranks[1], load(state=State.DRAINING))
    assert routable(directory, clock) == ["alone"]
    directory.heartbeat(ranks[1], load())
    assert routable(directory, clock) == ["alone", "p0", "p1", "p2"]
    directory.deregister(ranks[0])
    assert routable(directory, clock) == ["alone"]
