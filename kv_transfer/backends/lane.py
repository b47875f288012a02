"""One thread that runs reads in order, with prompt cancellation. Shared by the embedded transports.

The thread is the only writer of target memory: when its run of a job has returned or raised, nothing of that job can
land any more, and only then is the operation closed.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from core.clock import Clock
from core.errors import Aborted, NoCapacity, TandemError, TransferFailed
from core.ids import LeaseId
from kv_transfer.api import Op, Records
from kv_transfer.backends.ledger import OpLedger

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """A read on its way. `cancelled` is set by any thread and looked at by the lane's."""

    op: Op
    records: Records
    lease: LeaseId
    deadline: float
    cancelled: bool = False

    def check(self, clock: Clock) -> None:
        """Raise `Aborted` if cancelled, `TransferFailed` if late (the request itself may still have time)."""
        if self.cancelled:
            raise Aborted("the read was cancelled")
        if clock.now() >= self.deadline:
            raise TransferFailed("the read did not finish in time")


class Lane:
    """Runs jobs one after the other on its own thread."""

    def __init__(self, name: str, ledger: OpLedger, run: Callable[[Job], None], max_jobs: int) -> None:
        self._ledger = ledger
        self._run = run
        self._max_jobs = max_jobs
        self._lock = threading.Lock()
        self._wake = threading.Lock()
        """Held while the thread has, or looks for, something to do; it sleeps on it."""
        self._wake.acquire()
        self._idle = False
        """The thread has found nothing and goes to sleep, or sleeps: whoever ends that releases `_wake`, once."""
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, make: Callable[[], Job]) -> Op:
        """Queue a job; raises `NoCapacity` (and makes nothing) if the lane is full, `TransferFailed` if it is over."""
        with self._lock:
            if self._stopped:
                raise TransferFailed("the peer was disconnected")
            if len(self._waiting) + (self._current is not None) >= self._max_jobs:
                raise NoCapacity(f"{self._max_jobs} reads are in flight already")
            job = make()
            self._waiting.append(job)
            self._rouse()
            return job.op

    def cancel(self, op: Op) -> None:
        """Stop a job: one that waits ends now, the running one at its next step. Unknown ops are ignored."""
        with self._lock:
            if self._current is not None and self._current.op is op:
                self._current.cancelled = True
                return
            job = next((job for job in self._waiting if job.op is op), None)
            if job is None:
                return
            self._waiting.remove(job)
        self._ledger.close(op, Aborted("the read was cancelled"))

    def stop(self) -> None:
        """Cancel everything and wait for the thread: on return nothing of this lane can land. Idempotent."""
        with self._lock:
            self._stopped = True
            waiting = list(self._waiting)
            self._waiting.clear()
            if self._current is not None:
                self._current.cancelled = True
            self._rouse()
        for job in waiting:
            self._ledger.close(job.op, Aborted("the peer was disconnected"))
        self._thread.join()

    @property
    def following(self) -> Job | None:
        """The job that runs after the current one, unless it is cancelled before. For the lane's own thread."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    @property
    def stopped(self) -> bool:
        """True once `stop` was called."""
        return self._stopped

    def _loop(self) -> None:
        while True:
            job = self._take()
            while job is not None:
                error = self._attempt(job)
                following = self._take()
                self._ledger.close(job.op, error)
                job = following
            if self._stopped:
                return
            self._wake.acquire()

    def _take(self) -> Job | None:
        """Make the next job the current one. None: there is none, and `_wake` will be released when that changes."""
        with self._lock:
            self._current = self._waiting.popleft() if self._waiting else None
            self._idle = self._current is None
            return self._current

    def _rouse(self) -> None:
        if self._idle:
            self._idle = False
            self._wake.release()

    def _attempt(self, job: Job) -> Exception | None:
        try:
            self._run(job)
        except TandemError as error:
            return error
        except Exception as error:
            logger.exception("a KV read failed")
            return TransferFailed(f"the read failed: {error}")
        return None
