import numpy as np
import pytest

from core.errors import InvariantError
from engine.events import SeqId
from engine.sequence import _NEXT, SeqState, Sequence
from tests.fakes.engine_rig import request_of


def sequence(state):
    return Sequence(
        id=SeqId(1),
        request=request_of([1], 1),
        deadline=1.0,
        arrival=1,
        is_source=False,
        state=state,
        tokens=np.zeros(1, np.int32),
        hashes=[],
    )


@pytest.mark.parametrize("state", SeqState)
@pytest.mark.parametrize("to", SeqState)
def test_only_moves_of_the_table_are_possible(state, to):
    seq = sequence(state)
    if to in _NEXT[state]:
        seq.move(to)
        assert seq.state is to
    else:
        with pytest.raises(InvariantError, match=state.value):
            seq.move(to)
        assert seq.state is state


def test_every_state_has_a_way_to_the_end():
    assert set(_NEXT) == set(SeqState)
    for state in SeqState:
        seen, todo = set(), [state]
        while todo:
            here = todo.pop()
            if here not in seen:
                seen.add(here)
                todo.extend(_NEXT[here])
        assert SeqState.ENDED in seen


def test_an_ended_sequence_stays_ended():
    assert _NEXT[SeqState.ENDED] == frozenset()
