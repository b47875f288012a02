"""Times SmolLM2 through `Model.forward` on the CPU: prefill and batched decode, without engine, scheduler or sampler.

Each figure is the best of several runs, in wall time and in CPU time of the process; on a machine that does other work
only the CPU time of one thread means much. `--record` keeps the figures.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.model_driver import ModelDriver
from benchmarks.record import write_record
from deploy.local.models import cache_directory
from engine.models.builtin import prepare_builtin
from engine.models.model import Model
from engine.models.registry import load_model

PREFILL_TOKENS = 512
CONTEXT_TOKENS = 128
STEPS = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement."""

    phase: str
    rows: int
    threads: int
    deterministic: bool
    tokens_per_s: float
    step_ms: float
    step_cpu_ms: float
    """Of all threads, waiting for one another included."""


def timed(step: Callable[[], object], runs: int) -> tuple[float, float]:
    """Return the best wall and the best CPU seconds of `runs` calls, each on its own."""
    wall = cpu = float("inf")
    for _ in range(runs):
        start, used = time.perf_counter(), time.process_time()
        step()
        wall, cpu = min(wall, time.perf_counter() - start), min(cpu, time.process_time() - used)
    return wall, cpu


def prefill(model: Model, repeats: int, *, deterministic: bool) -> tuple[float, float]:
    """Time one prompt of PREFILL_TOKENS tokens in one step."""
    driver = ModelDriver(model, num_rows=1, max_tokens=PREFILL_TOKENS, page_tokens=16, deterministic=deterministic)
    prompt = [(i * 7919) % 40_000 + 10 for i in range(PREFILL_TOKENS)]

    def step() -> None:
        driver.lengths[0] = 0
        driver.step({0: prompt})

    return timed(step, repeats)


def decode(model: Model, rows: int, repeats: int, *, deterministic: bool) -> tuple[float, float]:
    """Time a decode step of `rows` rows after CONTEXT_TOKENS tokens."""
    length = CONTEXT_TOKENS + repeats * STEPS + 1
    driver = ModelDriver(model, num_rows=rows, max_tokens=length, page_tokens=16)
    for row in range(rows):
        driver.step({row: [(i * 104_729 + row) % 40_000 + 10 for i in range(CONTEXT_TOKENS)]})
    driver.deterministic = deterministic
    return timed(lambda: driver.step({row: [row + 11] for row in range(rows)}), repeats * STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time SmolLM2 on the CPU.")
    parser.add_argument("--cache-dir", type=Path, default=cache_directory())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    model = load_model(prepare_builtin("smollm2", options.cache_dir), verify=False)
    load = os.getloadavg()[0]
    figures: list[Figure] = []

    def add(phase: str, rows: int, tokens: int, best: tuple[float, float], *, threads: int, fixed: bool) -> None:
        seconds, cpu = best
        rate, wall_ms, cpu_ms = round(tokens / seconds, 1), round(seconds * 1e3, 1), round(cpu * 1e3, 1)
        figures.append(Figure(phase, rows, threads, fixed, rate, wall_ms, cpu_ms))
        print(
            f"threads {threads}  {'deterministic' if fixed else 'fast':13}  {phase:8} rows {rows:3}  "
            f"{rate:8.1f} tokens/s  step {wall_ms:8.1f} ms  cpu {cpu_ms:8.1f} ms"
        )

    for threads in options.threads:
        torch.set_num_threads(threads)
        for fixed in (False, True):
            best = prefill(model, options.repeats, deterministic=fixed)
            add("prefill", 1, PREFILL_TOKENS, best, threads=threads, fixed=fixed)
            for rows in options.rows:
                best = decode(model, rows, options.repeats, deterministic=fixed)
                add("decode", rows, rows, best, threads=threads, fixed=fixed)
    if options.record:
        note = f"SmolLM2-135M float32; prefill of {PREFILL_TOKENS} tokens, decode after {CONTEXT_TOKENS} tokens; load average before {load:.1f}"
        write_record("model_cpu", [asdict(f) for f in figures], note=note)


if __name__ == "__main__":
    main()
