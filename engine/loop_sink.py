"""Carries engine events from the scheduler thread to an event loop, in order. Knows no worker."""

import asyncio
import contextlib
from collections.abc import Callable

from core.worker import KvEventBatch
from engine.events import StepEvents


class LoopSink:
    """`EventSink` that posts to a loop; receivers are named by `connect` before the engine starts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
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
        if events.kv_events:
            self._on_kv(KvEventBatch(sequence=events.kv_sequence, events=events.kv_events))
        self._on_step(events)
