"""How late the event loop turns, and how long garbage collection stops it: what every stream of the process feels."""

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

from core.clock import Clock
from core.metrics import Metrics

TICK_S = 0.1
YOUNG, MIDDLE, OLD = 20_000, 20, 20
"""Allocations before the collector looks at the young objects, and how often it does before it looks at older ones.
Requests hold thousands of objects while they run, and none of them are garbage: the usual 700 stops for nothing."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


def settle_collector() -> None:
    """What was built up to now lives as long as the process: the garbage collector never looks at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


class LoopHealth:
    """Measures one loop; `watch` is an owned task."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._clock = clock
        self._lag = metrics.histogram(
            "tandem_gateway_loop_lag_seconds", "How late a timer of the event loop was served.", _SECONDS
        )
        self._pause = metrics.histogram(
            "tandem_gateway_gc_pause_seconds", "Stops of the process by the garbage collector.", _SECONDS
        )
        self._began = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        gc.callbacks.append(self._collected)
        try:
            while True:
                due = self._clock.now() + TICK_S
                await asyncio.sleep(TICK_S)
                self._lag.observe(max(0.0, self._clock.now() - due))
        finally:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._began = self._clock.now()
        else:
            self._pause.observe(self._clock.now() - self._began)
