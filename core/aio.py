"""Asyncio building blocks: an owned set of tasks, a bounded mailbox that any thread may post to, deadlines.

Knows no peers and no messages. Everything here is used on one event loop except `Mailbox.post`.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from core.clock import Clock
from core.errors import DeadlineExceeded

T = TypeVar("T")
OnCrash = Callable[[str, BaseException], None]
"""Told the name of a task that crashed, and its exception."""
logger = logging.getLogger(__name__)


class Tasks:
    """Owns tasks: a crash is logged and told, `close` cancels and awaits what is left. One event loop.

    A task that ends by itself is forgotten. `on_crash` gets the task's name and its exception; without one the
    first crash can be awaited through `crashed`.
    """

    def __init__(self, on_crash: OnCrash | None = None) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_crash = on_crash
        self._closed = False
        self._first_crash: BaseException | None = None
        self._crash_seen = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task that this set owns. After `close` the work is refused and its coroutine closed."""
        if self._closed:
            work.close()
            raise RuntimeError(f"the task set is closed; {name!r} is not started")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        logger.error("task %s crashed", task.get_name(), exc_info=error)
        if self._first_crash is None:
            self._first_crash = error
            self._crash_seen.set()
        if self._on_crash is not None:
            self._on_crash(task.get_name(), error)

    async def crashed(self) -> BaseException:
        """Wait for the first crash of any task and return its exception."""
        await self._crash_seen.wait()
        assert self._first_crash is not None
        return self._first_crash

    async def close(self) -> None:
        """Cancel all tasks and wait until each has ended; idempotent. A task never cancels or awaits itself."""
        self._closed = True
        current = asyncio.current_task()
        pending = [task for task in self._tasks if task is not current]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.gather(*pending, return_exceptions=True)


class Mailbox(Generic[T]):
    """A bounded queue with one consumer on the event loop that made it; `post` may be called from any thread.

    A burst of posts wakes the consumer once. Closing lets the consumer take what is left, then ends it.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a mailbox holds at least one item")
        self.capacity = capacity
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._signalled = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def post(self, item: T) -> bool:
        """Append without waiting. False if the mailbox is full or closed: the item was not taken. Any thread."""
        with self._lock:
            if self._closed or len(self._items) >= self.capacity:
                return False
            self._items.append(item)
            wake, self._signalled = not self._signalled, True
        if wake:
            self._wake()
        return True

    async def put(self, item: T) -> bool:
        """Append, waiting for room. False if the mailbox is closed. Only on the mailbox's own loop."""
        while not self._closed:
            if self.post(item):
                return True
            self._room.clear()
            await self._room.wait()
        return False

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._filled.set()
            return
        try:
            self._loop.call_soon_threadsafe(self._filled.set)
        except RuntimeError:
            # The loop is closed: nobody will ever read this mailbox again.
            self._closed = True

    def try_get(self) -> T | None:
        """Return the oldest item, or None if there is none now."""
        with self._lock:
            if not self._items:
                return None
            item = self._items.popleft()
        self._room.set()
        return item

    async def get_all(self) -> list[T]:
        """Wait for items and take all of them, oldest first. An empty list: closed and drained. Cancel-safe."""
        while True:
            with self._lock:
                items = list(self._items)
                self._items.clear()
                self._signalled = False
            if items:
                self._room.set()
                return items
            if self._closed:
                return []
            self._filled.clear()
            await self._filled.wait()

    async def get(self) -> T | None:
        """Wait for one item; None: closed and drained (so do not post None). Cancel-safe."""
        while True:
            item = self.try_get()
            if item is not None:
                return item
            with self._lock:
                self._signalled = False
                if self._items:
                    continue
            if self._closed:
                return None
            self._filled.clear()
            await self._filled.wait()

    def close(self) -> None:
        """Refuse new items and end the consumer once it has taken the rest; idempotent. Loop thread only."""
        self._closed = True
        self._filled.set()
        self._room.set()


class Deadline:
    """A moment on a clock. Made from a peer's relative timeout, compared only within this process."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self.at = clock.now() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - self._clock.now())

    @property
    def has_passed(self) -> bool:
        """True from the moment itself on."""
        return self._clock.now() >= self.at


@asynccontextmanager
async def within(timeout_s: float, what: str) -> AsyncGenerator[None]:
    """Bound the body. Raises `DeadlineExceeded` that names `what`; a `TimeoutError` of the body itself passes through."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"{what} took longer than {timeout_s:g} s") from error
