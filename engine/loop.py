"""The one step loop: ingest, poll, plan n+1, launch it, collect n, process n, emit. For every worker and device.

Step n is processed while step n+1 computes, so plans are made from upper bounds of lengths. A row that a token ends
has one surplus slot in the next step, which is dropped by its generation; rows that their length ends are left out in
time. When there is nothing to do the loop sleeps on its inbox. Knows no threads: whoever calls `run` is the scheduler.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from core.clock import Clock
from engine.barrier import Exchange, GroupBarrier
from engine.engine import Engine
from engine.events import EventSink
from engine.plan import Plan, Runner, StepHandle

IDLE_WAIT_S = 0.25
"""Longest sleep without work: deadlines and the heartbeat are looked after that often."""
INGEST_LIMIT = 256
"""Calls taken from the inbox per pass."""


class Inbox(Protocol):
    """Calls from other threads, in order."""

    @property
    def is_closed(self) -> bool:
        """True when the loop is to end."""
        ...

    def run_some(self, engine: Engine, limit: int) -> int:
        """Run up to `limit` waiting calls on the calling thread; returns how many ran."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until a call waits, the inbox is closed, or the time is over."""
        ...


@dataclass(slots=True)
class PhaseTimes:
    """CPU seconds of the scheduler thread by phase, and wall seconds spent waiting for steps."""

    ingest: float = 0.0
    plan: float = 0.0
    launch: float = 0.0
    process: float = 0.0
    emit: float = 0.0
    collect_wait: float = 0.0
    passes: int = 0
    steps: int = 0


@dataclass(slots=True)
class _InFlight:
    plan: Plan
    handle: StepHandle


@dataclass(slots=True)
class StepLoop:
    """Runs one engine on one runner. `turn` is one pass; `run` repeats it until the inbox is closed."""

    engine: Engine
    runner: Runner
    inbox: Inbox
    sink: EventSink
    clock: Clock
    barrier: GroupBarrier
    cpu_time: Callable[[], float] = time.thread_time
    wall_time: Callable[[], float] = time.perf_counter
    times: PhaseTimes = field(default_factory=PhaseTimes)
    last_pass_at: float = 0.0
    _pending: _InFlight | None = None

    def run(self) -> None:
        """Repeat until the inbox is closed; a step in flight is finished first. Raises what a pass raises."""
        self.last_pass_at = self.clock.now()
        while not self.inbox.is_closed or self._pending is not None:
            if not self.turn():
                self.inbox.wait(IDLE_WAIT_S)

    def turn(self) -> bool:
        """Do one pass; returns False if there was nothing to do."""
        self.last_pass_at = self.clock.now()
        times, cpu = self.times, self.cpu_time
        t0 = cpu()
        ingested = self.inbox.run_some(self.engine, INGEST_LIMIT)
        self.engine.poll()
        t1 = cpu()
        plan = None if self.inbox.is_closed else self.engine.plan()
        t2 = cpu()
        launched = self._launch(plan)
        t3 = cpu()
        times.passes += 1
        times.ingest += t1 - t0
        times.plan += t2 - t1
        times.launch += t3 - t2
        if self.engine.has_chunks:
            # A destination can read cached pages while the step that computes the rest runs.
            self._emit()
        finished, self._pending = self._pending, launched
        if finished is not None:
            self._finish(finished)
        self._emit()
        return bool(ingested) or launched is not None or finished is not None

    def _launch(self, plan: Plan | None) -> _InFlight | None:
        mine = np.zeros(len(Exchange), np.int32)
        if plan is not None:
            mine[Exchange.TOKENS] = len(plan.tokens)
            mine[Exchange.ROWS] = len(plan.rows)
            mine[Exchange.STEP] = plan.step
        mine[Exchange.FREE_PAGES] = self.engine.free_pages()
        agreed = self.barrier.exchange(mine)
        if plan is None and agreed[Exchange.TOKENS] > 0:
            plan = self.engine.empty_plan()
        if plan is None:
            return None
        self.times.steps += 1
        return _InFlight(plan, self.runner.launch(plan.encode()))

    def _finish(self, step: _InFlight) -> None:
        before = self.wall_time()
        result = self.runner.collect(step.handle)
        self.times.collect_wait += self.wall_time() - before
        start = self.cpu_time()
        self.engine.process(step.plan, result)
        self.times.process += self.cpu_time() - start

    def _emit(self) -> None:
        start = self.cpu_time()
        events = self.engine.take_events()
        if not events.is_empty:
            self.sink.emit(events)
        self.times.emit += self.cpu_time() - start
