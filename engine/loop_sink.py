"""Carries engine events from the scheduler thread to an event loop, in order. Knows no worker."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from core.worker import KvEventBatch
from engine.events import StepEvents

_LOG = logging.getLogger(__name__)


class LoopSink:
    """`EventSink` that posts to a loop; receivers are named by `connect` before the engine starts.

    A receiver that raises has lost events for good, which is our own bug: `on_crash` is told, on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._on_crash = on_crash
        self._on_step: Callable[[StepEvents], None] | None = None
        self._on_kv: Callable[[KvEventBatch], None] | None = None

    def connect(self, on_step: Callable[[StepEvents], None], on_kv: Callable[[KvEventBatch], None]) -> None:
        """Name who hears of steps and of changes of the prefix tree, on the loop."""
        self._on_step, self._on_kv = on_step, on_kv

    def emit(self, events: StepEvents) -> None:
        # After the loop has closed nobody listens.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, events)

    def _take(self, events: StepEvents) -> None:
        assert self._on_step is not None
        assert self._on_kv is not None
        try:
            if events.kv_events:
                self._on_kv(KvEventBatch(sequence=events.kv_sequence, events=events.kv_events))
            self._on_step(events)
        except Exception as error:  # noqa: BLE001 - the top of a callback: logged, and the owner stops the process
            _LOG.critical("a receiver of engine events crashed", exc_info=error)
            self._on_crash(error)
