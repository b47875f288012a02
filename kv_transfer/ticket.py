"""The two state machines of a hand-over: the destination's transfer and the source's lease.

Each is an enum, a table and one method that moves. They are total: an event of the peer that a state does not know
is answered with False and changes nothing, so duplicates and stragglers are harmless; an event of our own that a state
does not know is our bug. The first terminal decision wins. Knows no message, no clock and no memory.
"""

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from core.errors import InvariantError


class TransferState(enum.StrEnum):
    """Destination side. COMMITTED and DEAD are final."""

    INIT = "init"
    PREPARED = "prepared"
    LANDING = "landing"
    VERIFYING = "verifying"
    COMMITTED = "committed"
    CANCELLING = "cancelling"
    """Decided to fail; the host has not been told yet."""
    QUARANTINED = "quarantined"
    """Failed, and an operation may still write."""
    DEAD = "dead"


class TransferEvent(enum.StrEnum):
    """What moves a transfer. The last five are our own, the others come from the peer or the link."""

    ACCEPT = "accept"
    REJECT = "reject"
    CHUNK = "chunk"
    FINAL = "final"
    FAILED = "failed"
    VALID = "valid"
    """Released{valid}."""
    INVALID = "invalid"
    """Released{not valid}."""
    ABORTED = "aborted"
    GONE = "gone"
    LOST = "lost"
    """The lease lapsed, the link broke, or another incarnation answered."""

    LANDED = "landed"
    """Every read is over and verified; Release goes out."""
    CANCEL = "cancel"
    """Abort by the owner, a deadline, a failed read."""
    DROPPED = "dropped"
    """The host was told that the transfer failed; some operation is still open."""
    PROVEN = "proven"
    """No operation is open any more."""


class LeaseState(enum.StrEnum):
    """Source side. The last three are final."""

    GRANTED = "granted"
    PREFILLING = "prefilling"
    READY = "ready"
    """At least one chunk was announced."""
    FINAL = "final"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


class LeaseEvent(enum.StrEnum):
    """What moves a lease. STARTED, CHUNK and PREFILLED are our own engine's; the others can come at any time."""

    STARTED = "started"
    CHUNK = "chunk"
    PREFILLED = "prefilled"
    RELEASE = "release"
    ABORT = "abort"
    EXPIRE = "expire"
    FAILED = "failed"
    UNLINKED = "unlinked"
    """The control link is gone."""


_T, _E = TransferState, TransferEvent
_GIVE_UP: Mapping[TransferEvent, TransferState] = {
    _E.REJECT: _T.CANCELLING,
    _E.FAILED: _T.CANCELLING,
    _E.GONE: _T.CANCELLING,
    _E.LOST: _T.CANCELLING,
    _E.CANCEL: _T.CANCELLING,
}
TRANSFER_TABLE: Mapping[TransferState, Mapping[TransferEvent, TransferState]] = {
    _T.INIT: {**_GIVE_UP, _E.ACCEPT: _T.PREPARED, _E.CHUNK: _T.INIT, _E.FINAL: _T.INIT},
    _T.PREPARED: {**_GIVE_UP, _E.CHUNK: _T.LANDING, _E.FINAL: _T.LANDING},
    _T.LANDING: {**_GIVE_UP, _E.CHUNK: _T.LANDING, _E.FINAL: _T.LANDING, _E.LANDED: _T.VERIFYING},
    _T.VERIFYING: {**_GIVE_UP, _E.VALID: _T.COMMITTED, _E.INVALID: _T.CANCELLING},
    _T.COMMITTED: {},
    _T.CANCELLING: {_E.CANCEL: _T.CANCELLING, _E.DROPPED: _T.QUARANTINED, _E.PROVEN: _T.DEAD},
    _T.QUARANTINED: {_E.CANCEL: _T.QUARANTINED, _E.PROVEN: _T.DEAD},
    _T.DEAD: {},
}
"""INIT keeps chunks and the final that overtook Accept; the inbox of the transfer holds them."""
TRANSFER_OWN = frozenset({_E.LANDED, _E.DROPPED, _E.PROVEN})

_L, _V = LeaseState, LeaseEvent
_END: Mapping[LeaseEvent, LeaseState] = {
    _V.RELEASE: _L.RELEASED,
    _V.ABORT: _L.ABORTED,
    _V.EXPIRE: _L.EXPIRED,
    _V.FAILED: _L.ABORTED,
    _V.UNLINKED: _L.ABORTED,
}
LEASE_TABLE: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = {
    _L.GRANTED: {**_END, _V.STARTED: _L.PREFILLING},
    _L.PREFILLING: {**_END, _V.CHUNK: _L.READY, _V.PREFILLED: _L.FINAL},
    _L.READY: {**_END, _V.CHUNK: _L.READY, _V.PREFILLED: _L.FINAL},
    _L.FINAL: {**_END},
    _L.RELEASED: {},
    _L.EXPIRED: {},
    _L.ABORTED: {},
}

StateT = TypeVar("StateT", bound=enum.StrEnum)
EventT = TypeVar("EventT", bound=enum.StrEnum)


class Machine(Generic[StateT, EventT]):
    """One state and the only method that changes it. Used by one thread."""

    def __init__(
        self, table: Mapping[StateT, Mapping[EventT, StateT]], start: StateT, own: frozenset[EventT] = frozenset()
    ) -> None:
        self.state = start
        self._table = table
        self._own = own

    def move(self, event: EventT) -> bool:
        """Apply an event; False if this state ignores it. One of our `own` out of place raises `InvariantError`."""
        to = self._table[self.state].get(event)
        if to is None:
            if event in self._own:
                raise InvariantError(f"event {event} must not happen in state {self.state}")
            return False
        self.state = to
        return True

    @property
    def ended(self) -> bool:
        """True in a final state."""
        return not self._table[self.state]


def transfer_machine() -> Machine[TransferState, TransferEvent]:
    """Return the destination's machine of one hand-over."""
    return Machine(TRANSFER_TABLE, TransferState.INIT, TRANSFER_OWN)


def lease_machine() -> Machine[LeaseState, LeaseEvent]:
    """Return the source's machine of one hand-over."""
    return Machine(LEASE_TABLE, LeaseState.GRANTED)
