"""States of a process: only the moves of the table."""

import pytest

from core.errors import InvariantError
from core.lifecycle import Lifecycle, State


def test_a_process_goes_from_start_to_end_and_tells_its_observer():
    seen = []
    life = Lifecycle(seen.append)
    for state in (State.LOADING, State.WARMING, State.READY, State.DRAINING, State.GONE):
        life.move(state)
    assert seen[-1] is State.GONE
    assert not life.accepts_work


def test_only_ready_accepts_work():
    life = Lifecycle()
    assert not life.accepts_work
    life.move(State.READY)
    assert life.accepts_work


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ((State.READY, State.DRAINING), State.READY),
        ((State.READY, State.DRAINING, State.GONE), State.STARTING),
        ((State.FAILED,), State.READY),
        ((), State.GONE),
    ],
)
def test_a_move_outside_the_table_is_our_bug(path, to):
    life = Lifecycle()
    for state in path:
        life.move(state)
    with pytest.raises(InvariantError):
        life.move(to)
