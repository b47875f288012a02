"""Times DeepSeek-V4.1's tiny model on the CPU: prefill, decode and verify steps over packed caches, and proposals.

Straight through the model, without engine, scheduler or sampler. Each figure is the best of several runs, in wall time
and in CPU time of the process; on a machine that does other work only the CPU time of one thread means much. Goals on
two cores: 100 tokens of prompt in 1 s, a decode step of 8 rows in 100 ms. `--record` keeps the figures.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.model_cpu import timed
from benchmarks.model_driver import ModelDriver
from benchmarks.record import write_record
from deploy.local.models import cache_directory
from engine.models.builtin import prepare_builtin
from engine.models.drafter import DraftRows, SpeculativeModel
from engine.models.registry import load_model

PROMPT_TOKENS = 100
ROWS = 8
GOALS_MS = {"prefill": 1000.0, "decode": 100.0}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement: a step of `rows` rows with `tokens` query tokens each."""

    phase: str
    rows: int
    tokens: int
    threads: int
    deterministic: bool
    step_ms: float
    step_cpu_ms: float
    """Of all threads, waiting for one another included."""


class Bench:
    """One model and its steps."""

    def __init__(self, model: SpeculativeModel, repeats: int, *, deterministic: bool) -> None:
        self._model = model
        self._repeats = repeats
        self._driver = ModelDriver(
            model, num_rows=ROWS, max_tokens=PROMPT_TOKENS + 16, page_tokens=16, deterministic=deterministic
        )
        for row in range(ROWS):
            self._driver.step({row: self._prompt(row)})

    def prefill(self) -> tuple[float, float]:
        """Time one prompt in one step."""

        def step() -> None:
            self._driver.lengths[0] = 0
            self._driver.step({0: self._prompt(0)})

        return timed(step, self._repeats)

    def step(self, rows: int, tokens: int) -> tuple[float, float]:
        """Time a decode (or, with several tokens per row, verify) step behind the prompts."""

        def step() -> None:
            self._driver.lengths = [PROMPT_TOKENS] * ROWS
            self._driver.step({row: [40 + row] * tokens for row in range(rows)})

        return timed(step, self._repeats)

    def propose(self, rows: int) -> tuple[float, float]:
        """Time the drafts of one step."""
        drafter = self._model.drafter(self._driver.kv)
        wanted = DraftRows(
            rows=np.arange(rows, dtype=np.int32),
            anchors=np.full(rows, 50, np.int64),
            lengths=np.full(rows, PROMPT_TOKENS, np.int64),
        )

        def step() -> None:
            with torch.inference_mode():
                drafter.propose(wanted, lambda _, logits: logits.argmax(1))

        return timed(step, self._repeats)

    @staticmethod
    def _prompt(row: int) -> list[int]:
        return [(i * 7919 + row * 31) % 450 + 20 for i in range(PROMPT_TOKENS)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time v41-tiny on the CPU.")
    parser.add_argument("--cache-dir", type=Path, default=cache_directory())
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    model = load_model(prepare_builtin("v41-tiny", options.cache_dir), dtype="f32", mode="exact", verify=False)
    assert isinstance(model, SpeculativeModel)
    load = os.getloadavg()[0]
    figures: list[Figure] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for fixed in (False, True):
            bench = Bench(model, options.repeats, deterministic=fixed)
            drafts = 1 + model.num_drafts
            phases: list[tuple[str, int, int, Callable[[], tuple[float, float]]]] = [
                ("prefill", 1, PROMPT_TOKENS, bench.prefill),
                ("decode", 1, 1, lambda b=bench: b.step(1, 1)),
                ("decode", ROWS, 1, lambda b=bench: b.step(ROWS, 1)),
                ("verify", ROWS, drafts, lambda b=bench, d=drafts: b.step(ROWS, d)),
                ("propose", ROWS, model.num_drafts, lambda b=bench: b.propose(ROWS)),
            ]
            for phase, rows, tokens, run in phases:
                wall, cpu = run()
                figure = Figure(phase, rows, tokens, threads, fixed, round(wall * 1e3, 1), round(cpu * 1e3, 1))
                figures.append(figure)
                goal = GOALS_MS.get(phase, float("inf"))
                print(
                    f"threads {threads}  {'deterministic' if fixed else 'fast':13}  {phase:8} {rows:2} x {tokens:3}  "
                    f"{figure.step_ms:7.1f} ms  cpu {figure.step_cpu_ms:7.1f} ms"
                    f"{'  over the goal' if figure.step_ms > goal else ''}"
                )
    if options.record:
        note = (
            f"v41-tiny float32, exact mode; steps behind prompts of {PROMPT_TOKENS} tokens; goals on two cores: prefill "
            f"1 s, decode of {ROWS} rows 100 ms; load average before {load:.1f}"
        )
        write_record("v41_cpu", [asdict(f) for f in figures], note=note)


if __name__ == "__main__":
    main()
