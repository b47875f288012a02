"""Tries other shapes of kernels on a GPU: each is checked against the reference and timed beside its floor.

``python -m benchmarks.kernel_trials --out FILE [--seconds 200] trials.json ...``: a file is a list of
``{"op": .., "size": {..}, "set": {..}}``. The module of an op has a function `shape_of`, which returns a NamedTuple of all
that its launcher may choose; `set` replaces fields of it, nothing is the shape as it is. Processes side by side compile and
check first, then one process times what is right, with everything compiled.
"""

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine_parts import write_gpu_record
from benchmarks.kernel_case import Case
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_checks import check
from benchmarks.kernel_peers import PEERS
from benchmarks.kernel_timing import copy_bandwidth, matmul_flops, sets_for, time_us
from benchmarks.kernels_gpu import peer
from engine.kernels.ops import TRITON

Trial = dict[str, Any]


def case_of(trial: Trial) -> Case:
    """Return the first case of a trial's op, or the one that has its size."""
    cases = [case for case in CASES if case.op == trial["op"]]
    return next((case for case in cases if trial["size"] in case.large), cases[0])


def shaped(trial: Trial) -> Any:
    """Return a context in which the op's launcher takes the trial's shape."""
    if not trial["set"]:
        return contextlib.nullcontext()
    module = importlib.import_module(f"{TRITON.module}.{trial['op']}")
    original = module.shape_of

    def changed(*args: object, **keywords: object) -> object:
        return original(*args, **keywords)._replace(**trial["set"])

    return patch.object(module, "shape_of", changed)


def timed(trial: Trial, limits: dict[str, float], without: tuple[str, ...]) -> dict[str, object]:
    """Return microseconds of one call, its floor, and for the shape as it is what peers take, but those named so."""
    case = case_of(trial)
    generator = torch.Generator("cuda").manual_seed(1)
    first = case.make(generator, trial["size"])
    inputs = [first, *(case.make(generator, trial["size"]) for _ in range(sets_for(first.least_bytes) - 1))]
    kernel = TRITON.load(trial["op"])
    with shaped(trial):
        us, p90 = time_us([lambda i=i: kernel(*i.args, **i.keywords) for i in inputs], 20)
    floor = max(first.least_bytes / limits["copy"], first.flops / limits["bf16"]) * 1e6
    row: dict[str, object] = {"us": us, "us_p90": p90, "floor_us": floor, "of_limit": floor / us}
    if not trial["set"]:
        peers = {name: run for name, run in PEERS.get(trial["op"], {}).items() if not name.startswith(without)}
        row |= {name: peer(lambda run=run: run(inputs, trial["size"])) for name, run in peers.items()}
    return row


def check_share(trials: list[Trial], out: Path) -> None:
    """Compile and check trials, one line each; None says it is right."""
    with out.open("w") as file:
        for trial in trials:
            try:
                with shaped(trial):
                    wrong = check(case_of(trial), trial["size"], "cuda", seed=7)
            except Exception as error:  # noqa: BLE001 - a shape that does not compile is a result
                wrong = f"{type(error).__name__}: {str(error)[:300]}"
            file.write(json.dumps(wrong) + "\n")
            file.flush()
            # Others check beside this process.
            torch.cuda.empty_cache()


def checked(trials: list[Trial], workers: int, seconds: float) -> list[str | None]:
    """Return what is wrong with each trial, found by processes side by side."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for worker in range(min(workers, len(trials))):
            share, out = Path(folder) / f"{worker}.json", Path(folder) / f"{worker}.txt"
            share.write_text(json.dumps(trials[worker::workers]))
            command = [sys.executable, "-m", "benchmarks.kernel_trials", "--share", str(out), str(share)]
            started.append((worker, out, subprocess.Popen(command)))
        until = time.monotonic() + seconds
        found: list[str | None] = ["no time left to check it"] * len(trials)
        for worker, out, process in started:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for number, line in enumerate(out.read_text().splitlines() if out.exists() else []):
                found[worker + number * workers] = json.loads(line)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", type=Path, help="for the processes side by side")
    parser.add_argument("--commit", default="")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--without", default="", help="peers whose names begin so, with commas between")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    trials: list[Trial] = [trial for file in options.files for trial in json.loads(file.read_text())]
    if options.share:
        check_share(trials, options.share)
        return 0
    without = tuple(filter(None, options.without.split(",")))
    begun = time.monotonic()
    wrong = checked(trials, options.workers, options.seconds * 0.6)
    print(f"checked in {time.monotonic() - begun:.0f} s", flush=True)
    limits = {"copy": copy_bandwidth(), **matmul_flops()}
    torch.cuda.empty_cache()
    rows: list[dict[str, object]] = []
    for trial, error in zip(trials, wrong, strict=True):
        row: dict[str, object] = dict(trial)
        if error is not None:
            row["wrong"] = error
        elif time.monotonic() - begun > options.seconds:
            row["left_out"] = "no time left"
        else:
            try:
                row |= timed(trial, limits, without)
            except Exception as failure:  # noqa: BLE001 - one shape must not cost the others
                row["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
        rows.append(row)
        print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    note = "median and 90th percentile of 20 graph replays over rotating inputs; right ones only"
    write_gpu_record(options.out, options.commit, note, rows, limits_per_s=limits, seconds=time.monotonic() - begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
