"""The outermost shell of a service process: configuration, signals, leaving, exit codes, and the ready file.

Knows no service. Exit codes: 0 left in order, 1 crashed, 3 preflight failed with one plain sentence on stderr.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from core.clock import Clock, SystemClock
from core.config import load, parse_args, prepare_native_libraries
from core.errors import ConfigError, InvariantError
from core.lifecycle import EXIT_CRASH, EXIT_DRAINED, EXIT_PREFLIGHT

_LOG = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)


def check_port(host: str, port: int) -> None:
    """Raise `ConfigError` if a TCP port is taken: asked before anything slow or noisy starts. 0 is never taken."""
    if not port:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot listen on {host}:{port}: {reason}; choose another port or stop the process that holds it"
            ) from error


class Departure:
    """When and how fast this process leaves. Asyncio thread, except `begin_from_thread` and `crash_from_thread`."""

    def __init__(self, clock: Clock, budget_s: float) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._default_s = budget_s
        self._begun = asyncio.Event()
        self._leave_at = float("inf")
        self._scope: asyncio.Timeout | None = None
        self.error: BaseException | None = None
        """Why the process crashes, if it does."""

    def begin(self, budget_s: float | None = None) -> None:
        """Start to leave. A later call may shorten the budget, never lengthen it."""
        budget_s = self._default_s if budget_s is None else budget_s
        self._leave_at = min(self._leave_at, self._clock.now() + budget_s)
        self._begun.set()
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._loop.time() + self.left_s)

    def begin_from_thread(self) -> None:
        """As `begin`, from any thread."""
        self._loop.call_soon_threadsafe(self.begin)

    def crash(self, error: BaseException) -> None:
        """Something essential ended: leave at once with `EXIT_CRASH`."""
        if self.error is None:
            self.error = error
        self.begin(0.0)

    def task_crashed(self, _task: str, error: BaseException) -> None:
        """As `crash`, for the owner of a task (`core.aio.OnCrash`)."""
        self.crash(error)

    def callback_crashed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As the loop's exception handler: a broken invariant in a callback must not pass with a line in the log."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, InvariantError):
            self.crash(error)

    def crash_from_thread(self, error: BaseException) -> None:
        """As `crash`, from any thread."""
        self._loop.call_soon_threadsafe(self.crash, error)

    @property
    def has_begun(self) -> bool:
        """True once the process is leaving."""
        return self._begun.is_set()

    @property
    def left_s(self) -> float:
        """Seconds until the budget ends; infinite before `begin`."""
        return max(0.0, self._leave_at - self._clock.now())

    async def wait(self) -> None:
        """Wait until the process has to leave."""
        await self._begun.wait()

    async def bound(self, work: Awaitable[None]) -> bool:
        """Await `work`, at most until the budget ends, even if it is shortened meanwhile. True if it finished."""
        scope = asyncio.timeout(self.left_s)
        try:
            async with scope:
                self._scope = scope
                await work
        except TimeoutError:
            if not scope.expired():
                raise
            return False
        finally:
            self._scope = None
        return True


class ReadyFile:
    """`<run_dir>/<id>.json`: what a launcher reads; appears whole when the process is ready, goes when it leaves."""

    def __init__(self, run_dir: str, process_id: str) -> None:
        self._path = Path(run_dir) / f"{process_id}.json" if run_dir else None

    def write(self, facts: Mapping[str, object]) -> None:
        """Publish facts and our pid; raises `ConfigError` if the directory cannot be written."""
        if self._path is None:
            return
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            fresh.write_bytes(msgspec.json.encode({**facts, "pid": os.getpid()}))
            fresh.replace(self._path)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}; check run_dir") from error

    def remove(self) -> None:
        """Withdraw it, unless a successor wrote its own meanwhile."""
        if self._path is None:
            return
        try:
            if msgspec.json.decode(self._path.read_bytes(), type=dict[str, Any]).get("pid") == os.getpid():
                self._path.unlink()
        except (OSError, msgspec.MsgspecError):
            _LOG.debug("there is no ready file to remove")


Serve = Callable[[T, Departure], Coroutine[Any, Any, None]]


def run_process(
    kind: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    configure: Callable[[T], None],
    budget_s: Callable[[T], float],
    serve: Serve[T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run a service from its command line to its exit code. `serve` returns when the process has left in order.

    `loop_factory` makes the event loop (None: asyncio's own).
    """
    prepare_native_libraries()
    try:
        arguments = parse_args(argv, prog)
        config = load(kind, arguments.config, arguments.overrides)
        configure(config)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve_until_told(config, budget_s(config), serve))
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return EXIT_PREFLIGHT
    except Exception:  # noqa: BLE001 - the top of the process: logged, and the exit code says it
        _LOG.exception("the process crashed")
        return EXIT_CRASH
    return EXIT_DRAINED


async def _serve_until_told(config: T, budget_s: float, serve: Serve[T]) -> None:
    departure = Departure(SystemClock(), budget_s)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(departure.callback_crashed)
    signals = 0

    def told() -> None:
        nonlocal signals
        signals += 1
        # A second signal shortens the budget; none kills at once.
        departure.begin(budget_s if signals == 1 else budget_s / 10)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    await serve(config, departure)
    if departure.error is not None:
        raise departure.error
