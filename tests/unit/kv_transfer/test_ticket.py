"""The two state machines: total over the peer's events, strict over our own, first terminal decision wins."""

import itertools

import pytest

from core.errors import InvariantError
from kv_transfer.ticket import (
    LEASE_TABLE,
    TRANSFER_OWN,
    TRANSFER_TABLE,
    LeaseEvent,
    LeaseState,
    TransferEvent,
    TransferState,
    lease_machine,
    transfer_machine,
)

E, T = TransferEvent, TransferState


def test_the_tables_know_every_state():
    assert set(TRANSFER_TABLE) == set(TransferState)
    assert set(LEASE_TABLE) == set(LeaseState)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TransferState, TransferEvent)))
def test_every_event_of_a_transfer_moves_is_ignored_or_is_our_own_bug(state, event):
    machine = transfer_machine()
    machine.state = state
    if event in TRANSFER_TABLE[state]:
        assert machine.move(event)
        assert machine.state == TRANSFER_TABLE[state][event]
    elif event in TRANSFER_OWN:
        with pytest.raises(InvariantError):
            machine.move(event)
    else:
        assert not machine.move(event)
        assert machine.state == state


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LeaseState, LeaseEvent)))
def test_every_event_of_a_lease_moves_or_is_ignored(state, event):
    machine = lease_machine()
    machine.state = state
    assert machine.move(event) == (event in LEASE_TABLE[state])


def test_the_straight_way_of_a_transfer():
    machine = transfer_machine()
    states = [(machine.move(event), machine.state)[1] for event in (E.ACCEPT, E.CHUNK, E.FINAL, E.LANDED, E.VALID)]
    assert states == [T.PREPARED, T.LANDING, T.LANDING, T.VERIFYING, T.COMMITTED]
    assert machine.ended


def test_the_straight_way_of_a_lease():
    machine = lease_machine()
    events = (LeaseEvent.STARTED, LeaseEvent.CHUNK, LeaseEvent.PREFILLED, LeaseEvent.RELEASE)
    states = [(machine.move(event), machine.state)[1] for event in events]
    assert states == [LeaseState.PREFILLING, LeaseState.READY, LeaseState.FINAL, LeaseState.RELEASED]
    assert machine.ended


@pytest.mark.parametrize("state", [s for s in TransferState if s not in (T.VERIFYING, T.COMMITTED)])
def test_only_a_verifying_transfer_can_be_committed(state):
    assert all(to is not T.COMMITTED for to in TRANSFER_TABLE[state].values())


@pytest.mark.parametrize("state", [T.CANCELLING, T.QUARANTINED, T.DEAD])
def test_after_a_failure_nothing_leads_back(state):
    reachable, todo = set(), {state}
    while todo:
        at = todo.pop()
        reachable.add(at)
        todo |= set(TRANSFER_TABLE[at].values()) - reachable
    assert reachable <= {T.CANCELLING, T.QUARANTINED, T.DEAD}


def test_only_proof_leads_to_dead():
    leading = {event for row in TRANSFER_TABLE.values() for event, to in row.items() if to is T.DEAD}
    assert leading == {E.PROVEN}


@pytest.mark.parametrize("state", [s for s in TransferState if TRANSFER_TABLE[s] and s is not T.QUARANTINED])
def test_a_cancel_is_heard_in_every_living_state(state):
    assert TRANSFER_TABLE[state][E.CANCEL] is T.CANCELLING


@pytest.mark.parametrize("state", [s for s in LeaseState if LEASE_TABLE[s]])
@pytest.mark.parametrize("event", [LeaseEvent.ABORT, LeaseEvent.EXPIRE, LeaseEvent.UNLINKED, LeaseEvent.FAILED])
def test_a_lease_can_end_in_every_living_state(state, event):
    assert not LEASE_TABLE[LEASE_TABLE[state][event]]
