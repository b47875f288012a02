"""The scheduler thread, and the only bridge to it: calls go in, events come out through the sink.

Any thread may call; the engine itself is touched by the scheduler thread alone. If the loop crashes, every waiting
call fails, the last operations are logged, and the owner is told: a restart is cheaper than a wrong answer.
"""

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from core.clock import Clock
from core.errors import BadRequest, InvariantError, NoCapacity, TandemError, WorkerLost
from engine.barrier import GroupBarrier, SoloBarrier
from engine.engine import Engine
from engine.events import EventSink
from engine.grammar.compiler import GrammarCompiler
from engine.loop import PhaseTimes, StepLoop
from engine.plan import Runner

T = TypeVar("T")

MAX_WAITING_CALLS = 65_536

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to run on the scheduler thread, and whom to tell if it never will."""

    run: Callable[[Engine], object]
    fail: Callable[[Exception], object] | None = None


class CallInbox:
    """Bounded FIFO of calls; many threads put, the scheduler takes and sleeps on it."""

    def __init__(self, limit: int = MAX_WAITING_CALLS) -> None:
        self._limit = limit
        self._calls: collections.deque[_Call] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def put(self, call: _Call, *, always: bool = False) -> None:
        """Append; raises `NoCapacity` when full, unless `always`, and `WorkerLost` when closed."""
        with self._changed:
            if self._closed:
                raise WorkerLost("the engine has stopped")
            if len(self._calls) >= self._limit and not always:
                raise NoCapacity("the engine does not keep up with its calls", retry_after_s=1.0)
            self._calls.append(call)
            self._changed.notify()

    def run_some(self, engine: Engine, limit: int) -> int:
        count = 0
        while count < limit and self._calls:
            call = self._calls.popleft()
            count += 1
            try:
                call.run(engine)
            except InvariantError:
                raise
            except TandemError as error:
                _log.warning("a posted call was refused: %s", error)
        return count

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            if not self._calls and not self._closed:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """Refuse further calls and wake the sleeper; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def fail_all(self, error: Exception) -> None:
        """Tell everyone whose call never ran."""
        while self._calls:
            call = self._calls.popleft()
            if call.fail is not None:
                call.fail(error)


class EngineThread:
    """Owns an engine and its runner from `start` to `stop`."""

    def __init__(
        self,
        *,
        engine: Engine,
        runner: Runner,
        sink: EventSink,
        clock: Clock,
        barrier: GroupBarrier | None = None,
        grammars: GrammarCompiler | None = None,
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._clock = clock
        self._grammars = grammars
        self._on_crash = on_crash
        self._inbox = CallInbox()
        self._crash: BaseException | None = None
        self._loop = StepLoop(
            engine=engine,
            runner=runner,
            inbox=self._inbox,
            sink=sink,
            clock=clock,
            barrier=barrier if barrier is not None else SoloBarrier(),
        )
        self._thread = threading.Thread(target=self._run, name="tandem-scheduler", daemon=True)

    def start(self) -> None:
        """Start the scheduler thread."""
        self._loop.last_pass_at = self._clock.now()
        self._thread.start()

    async def ready(self, grammar: str) -> None:
        """Return once a request with this grammar may be queued; raises `BadRequest` if none ever may.

        Compiled elsewhere meanwhile: nobody else waits for it.
        """
        if self._grammars is not None:
            await self._grammars.ready(grammar)
        elif grammar:
            raise BadRequest("this worker makes no structured output", param="response_format")

    def grammar_statistics(self) -> dict[str, int | float]:
        """Return counters and gauges by name. Any thread."""
        return self._grammars.statistics() if self._grammars is not None else {}

    async def statistics(self, audit: bool, **parts: Mapping[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the numbers of the engine and of other parts, each with its part's name in front, and audit findings."""
        values, findings = await self.call(lambda engine: (engine.statistics(), engine.audit() if audit else []))
        all_parts: dict[str, Mapping[str, float]] = {"engine": {**values, **self.grammar_statistics()}, **parts}
        numbers = {f"{part}_{name}": value for part, found in all_parts.items() for name, value in found.items()}
        return numbers, tuple(findings)

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """Run `fn` on the scheduler thread and return its result; raises what it raised.

        Raises `WorkerLost` if the engine stops first. A caller that is cancelled does not stop `fn`.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # pyright: ignore[reportArgumentType] (None only if T allows it)

        def hop(result: T | None, error: BaseException | None) -> None:
            # The caller's event loop may have closed meanwhile; then nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        def run(engine: Engine) -> None:
            try:
                result = fn(engine)
            except Exception as error:
                hop(None, error)
                if not isinstance(error, TandemError) or isinstance(error, InvariantError):
                    raise
            else:
                hop(result, None)

        self._inbox.put(_Call(run, lambda error: hop(None, error)))
        return await answer

    def post(self, fn: Callable[[Engine], object], *, always: bool = False) -> None:
        """Run `fn` on the scheduler thread, in order of posting, and forget its result. Any thread.

        `always` is for what gives back something that an accepted call took: such calls are as many as those, and a
        refused one would be a leak. Others raise `NoCapacity` while the inbox is full. After the engine has stopped
        this does nothing: what `fn` would release is gone with it.
        """
        with contextlib.suppress(WorkerLost):
            self._inbox.put(_Call(fn), always=always)

    def look(self, fn: Callable[[Engine], T]) -> T:
        """Run `fn` here and now, maybe in the middle of a pass: for what the engine says any thread may ask.

        Raises `WorkerLost` after the engine has stopped.
        """
        if self._inbox.is_closed or self._crash is not None:
            raise WorkerLost("the engine has stopped")
        return fn(self._engine)

    def heartbeat_age_s(self) -> float:
        """Return the seconds since the loop's last pass began. Any thread."""
        return self._clock.now() - self._loop.last_pass_at

    @property
    def is_alive(self) -> bool:
        """True while the scheduler thread runs."""
        return self._thread.is_alive()

    @property
    def crash(self) -> BaseException | None:
        """What ended the loop, or None."""
        return self._crash

    @property
    def times(self) -> PhaseTimes:
        """Times by phase; written by the scheduler thread, so values read here may be a pass apart."""
        return self._loop.times

    async def stop(self) -> None:
        """End the loop after the step in flight, then the runner. Idempotent; sequences are dropped without events."""
        await asyncio.to_thread(self.join)

    def join(self) -> None:
        """As `stop`, blocking."""
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._runner.close()

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:  # noqa: BLE001 (top of the thread; the owner is told below)
            self._crash = error
            _log.critical(
                "the step loop crashed; last operations:\n%s",
                "\n".join(self._engine.post_mortem()[-100:]),
                exc_info=True,
            )
        self._inbox.close()
        self._inbox.fail_all(
            WorkerLost(f"the engine has stopped: {self._crash}" if self._crash else "the engine has stopped")
        )
        self._runner.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._crash is not None and self._on_crash is not None:
            self._on_crash(self._crash)
