"""Life-cycle states shared by every process, and the one method that moves between them.

Knows nothing of what a process does in a state; see `docs/failure-modes.md` for exit codes.
"""

import enum
from collections.abc import Callable

from core.errors import InvariantError

EXIT_DRAINED = 0
EXIT_CRASH = 1
EXIT_PREFLIGHT = 3
"""Configuration, model file, port or memory is wrong: do not restart fast."""


class State(enum.StrEnum):
    """Shown in /statusz, the registration and the metric `tandem_process_state`."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"
    FAILED = "failed"


_NEXT: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.LOADING, State.READY, State.DRAINING, State.FAILED}),
    State.LOADING: frozenset({State.WARMING, State.READY, State.DRAINING, State.FAILED}),
    State.WARMING: frozenset({State.READY, State.DRAINING, State.FAILED}),
    State.READY: frozenset({State.DRAINING, State.FAILED}),
    State.DRAINING: frozenset({State.GONE, State.FAILED}),
    State.GONE: frozenset(),
    State.FAILED: frozenset(),
}


class Lifecycle:
    """Holds the state of one process; observers are told of each move. Used by one thread."""

    def __init__(self, on_change: Callable[[State], None] | None = None) -> None:
        self.state = State.STARTING
        self._on_change = on_change

    def move(self, to: State) -> None:
        """Enter `to`; raises `InvariantError` on a move that the table does not allow."""
        if to not in _NEXT[self.state]:
            raise InvariantError(f"life cycle cannot go from {self.state} to {to}")
        self.state = to
        if self._on_change is not None:
            self._on_change(to)

    @property
    def accepts_work(self) -> bool:
        """True only in READY."""
        return self.state is State.READY
