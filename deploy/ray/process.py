"""A process under a supervisor on another host, in the shape that the launcher knows from its own children."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from core.aio import Tasks
from core.errors import ConfigError, WorkerLost
from core.lifecycle import EXIT_CRASH, EXIT_DRAINED, EXIT_PREFLIGHT
from deploy.ray.api import End, Order, Supervisor, Told

_LOG = logging.getLogger(__name__)
LOST = -1
"""Exit code of a process whose supervisor died or fell silent: what became of it is not known."""
PING_S = 1.0
SILENCE_S = 10.0
"""A supervisor that does not answer for so long is lost with its host. Traffic left by the lease (3 s) long before."""


class RemoteProcess:
    """Lives from its construction until `wait` returns. `order` None: the supervisor runs it already.

    `release` ends the supervisor and frees its name; it is called once the process is known to have ended.
    """

    def __init__(
        self,
        creation: Awaitable[Supervisor],
        order: Order | None,
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.facts: dict[str, object] = {}
        """What the process wrote when it became ready."""
        self.log = ""
        self.log_tail = ""
        self.is_lost = False
        """It may still run somewhere: its name must not be given to another."""
        self._release = release
        self._supervisor: asyncio.Future[Supervisor] = asyncio.ensure_future(creation)
        self._starting: asyncio.Future[Told] | None = None
        self._freed: asyncio.Task[End] | None = None
        self._signals: set[asyncio.Task[None]] = set()
        self._life = asyncio.create_task(self._live(order))

    async def wait(self) -> int:
        return await asyncio.shield(self._life)

    @property
    def is_waiting(self) -> bool:
        """Whether no host has taken it yet."""
        return self._starting is not None and not self._starting.done()

    def send_signal(self, signal: int, /) -> None:
        if self._starting is not None and self.is_waiting:
            self._starting.cancel()  # there is nothing to drain
            return
        task = asyncio.create_task(self._signal(signal))
        self._signals.add(task)
        task.add_done_callback(self._signals.discard)

    async def freed(self) -> bool:
        """Wait until a lost supervisor is dead or its process has ended; True if the process is known to have ended."""
        try:
            supervisor = await self._supervisor
            await asyncio.shield(self._freed or asyncio.create_task(supervisor.lifetime()))
        except WorkerLost:
            return False
        return True

    def close(self) -> None:
        """Stop following it; the process goes on."""
        for task in (self._life, self._starting, self._freed, *self._signals):
            if task is not None:
                task.cancel()

    async def _signal(self, number: int) -> None:
        try:
            await (await self._supervisor).signal(number)
        except WorkerLost:
            return

    async def _live(self, order: Order | None) -> int:
        try:
            end = await self._until_end(order)
        except Exception as error:  # noqa: BLE001 - the top of a task: a bug or a refusal of Ray's must not look like a slow start
            _LOG.exception("a process under a supervisor is given up")
            end = End(code=EXIT_CRASH, log_tail=f"{type(error).__name__}: {error}")
        self.log_tail = end.log_tail
        if self.is_lost:
            # Should its host come back, the process must not stay beside the one that replaced it.
            self.send_signal(signal.SIGTERM)
        else:
            await self._release()
        self.returncode = end.code
        return end.code

    async def _until_end(self, order: Order | None) -> End:
        try:
            supervisor = await self._supervisor
            self._starting = asyncio.ensure_future(supervisor.start(order) if order is not None else supervisor.told())
            await asyncio.wait({self._starting})
            if self._starting.cancelled():
                return End(code=EXIT_DRAINED, log_tail="it was told to leave before a host had taken it")
            told = self._starting.result()
        except ConfigError as error:
            return End(code=EXIT_PREFLIGHT, log_tail=error.message)
        except WorkerLost as error:
            return self._lost(error.message)
        self.pid, self.log = told.pid, f"{told.host}:{told.log}"
        self._freed = asyncio.create_task(supervisor.lifetime())
        helpers = Tasks()
        helpers.spawn(self._learn_ready(supervisor), name="ready")
        silence = helpers.spawn(self._ping(supervisor), name="ping")
        try:
            await asyncio.wait({self._freed, silence}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await helpers.close()
        if not self._freed.done():
            return self._lost(f"its supervisor is silent for {SILENCE_S:g} s")
        try:
            return self._freed.result()
        except WorkerLost as error:
            return self._lost(error.message)

    def _lost(self, reason: str) -> End:
        self.is_lost = True
        return End(code=LOST, log_tail=reason)

    async def _learn_ready(self, supervisor: Supervisor) -> None:
        try:
            self.facts = dict(await supervisor.ready())
        except WorkerLost:
            return

    async def _ping(self, supervisor: Supervisor) -> None:
        """Return once the supervisor is silent for too long."""
        while True:
            await asyncio.sleep(PING_S)
            try:
                async with asyncio.timeout(SILENCE_S):
                    await supervisor.told()
            except (TimeoutError, WorkerLost):
                return
