"""Decode steps recorded once for each number of rows, and what recording them took.

A recorded step reads the staged inputs of `DeviceMirror` and leaves logits in memory of its own, which the next replay
of any tier overwrites. Executor thread only.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.runner.device_mirror import StepShape
from engine.runner.device_stream import CapturedWork, DeviceStream

logger = logging.getLogger(__name__)

MIB = 1 << 20


def tiers_of(config: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of rows that decode steps are padded to, ascending; the last is `num_rows`."""
    wanted = set(config.graphs.tiers)
    size = 1
    while not config.graphs.tiers and size < config.num_rows:
        wanted.add(size)
        size *= 2
    return tuple(sorted({tier for tier in wanted if tier < config.num_rows} | {config.num_rows}))


@dataclass(frozen=True, slots=True)
class _Recorded:
    work: CapturedWork
    logits: torch.Tensor


class DecodeGraphs:
    """Recorded steps by tier."""

    def __init__(self, stream: DeviceStream, tiers: tuple[int, ...]) -> None:
        self._stream = stream
        self.tiers = tiers
        self._recorded: dict[int, _Recorded] = {}

    def shape(self, rows: int) -> StepShape:
        """Return the padded shape of a decode step of `rows` rows, at most the last tier."""
        tier = next(tier for tier in self.tiers if tier >= rows)
        return StepShape(tier, tier, tier)

    def record(self, prepare: Callable[[StepShape], None], forward: Callable[[StepShape], torch.Tensor]) -> None:
        """Record `forward` for every tier, the largest first: the smaller ones use its memory again.

        `prepare` stages inputs for which it may really run.
        """
        before, begun = self._stream.used_bytes()[0], time.perf_counter()
        for number, tier in enumerate(reversed(self.tiers)):
            shape = StepShape(tier, tier, tier)
            # Once before: what is compiled or allocated at a first call must not be recorded.
            prepare(shape)
            forward(shape)
            self._stream.mark().wait()
            self._recorded[tier] = _Recorded(*self._stream.capture(lambda shape=shape: forward(shape)))
            logger.info("recorded decode steps of %d rows (%d of %d)", tier, number + 1, len(self.tiers))
        used, total = self._stream.used_bytes()
        logger.info(
            "recorded %d sizes of decode steps in %.1f s: %.0f MiB, device memory %.0f of %.0f MiB in use",
            len(self.tiers),
            time.perf_counter() - begun,
            (used - before) / MIB,
            used / MIB,
            total / MIB,
        )

    def replay(self, shape: StepShape) -> torch.Tensor | None:
        """Queue the recorded step of a shape and return its logits [m, vocab]; None if there is none."""
        found = self._recorded.get(shape.rows)
        if found is None:
            return None
        found.work.replay()
        return found.logits
