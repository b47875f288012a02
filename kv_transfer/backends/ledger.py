"""Book of operations of one transport: opened before a byte moves, closed only by a proof that none moves any more.

Thread-safe. Knows no bytes; whoever moves them says when it has stopped.
"""

import threading
from collections.abc import Callable

from core.clock import Clock
from core.errors import Aborted
from core.ids import TransferId
from kv_transfer.api import Op, OpState


class OpLedger:
    """All operations of one transport."""

    def __init__(self, clock: Clock, on_event: Callable[[], None]) -> None:
        self._clock = clock
        self._on_event = on_event
        self._lock = threading.Lock()
        self._open: dict[int, Op] = {}
        self._changed: list[Op] = []
        self._last_id = 0
        self._destroyed = False

    def open(self, transfer: TransferId, nbytes: int) -> Op:
        """Record an operation that is about to be posted."""
        with self._lock:
            self._last_id += 1
            op = Op(self._last_id, transfer, nbytes, self._clock.now())
            self._open[op.id] = op
            return op

    def close(self, op: Op, error: Exception | None = None) -> None:
        """The thread that moved the bytes has stopped for good: DONE, or FAILED with `error`. The first call wins."""
        with self._lock:
            if self._open.pop(op.id, None) is None:
                return
            op.error = error
            op.state = OpState.DONE if error is None else OpState.FAILED
            self._changed.append(op)
        self._on_event()

    def doubt(self, op: Op, error: Exception) -> None:
        """It has failed, and may still write: UNPROVEN until `close`. The first call wins."""
        with self._lock:
            if op.id not in self._open or op.state is not OpState.POSTED:
                return
            op.error = error
            op.state = OpState.UNPROVEN
            self._changed.append(op)
        self._on_event()

    def poll(self) -> list[Op]:
        """Return and forget the operations that changed."""
        with self._lock:
            changed, self._changed = self._changed, []
            return changed

    def quiesced(self, op: Op) -> bool:
        """True iff the operation was closed, or everything was destroyed."""
        with self._lock:
            return self._destroyed or op.state in (OpState.DONE, OpState.FAILED)

    def destroy(self) -> None:
        """Every thread has ended: fail what is open. Idempotent."""
        for op in list(self._open.values()):
            self.close(op, Aborted("the transport was destroyed"))
        with self._lock:
            self._destroyed = True

    @property
    def num_open(self) -> int:
        """Operations without proof of their end."""
        return len(self._open)
