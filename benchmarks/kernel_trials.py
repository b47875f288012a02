"""Tries other shapes of kernels on a GPU: each is checked against the reference and timed beside its floor.

``python -m benchmarks.kernel_trials --out FILE [--seconds 200] trials.json ...``: a file is a list of
``{"op": .., "size": {..}, "set": {..}}``. The module of an op has a function `shape_of`, which returns a NamedTuple of all
that its launcher may choose; `set` replaces fields of it, nothing is the shape as it is. `check` names a smaller size for
the reference; `compiled` times the reference under `torch.compile`, too. Processes side by side compile and check first,
then one process times what is right, with everything compiled.
"""

import argparse
import contextlib
import gc
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
from benchmarks.kernel_checks import check, provider_named
from benchmarks.kernel_peers import PEERS, peer
from benchmarks.kernel_timing import REPLAYS, compiled_us, copy_bandwidth, matmul_flops, sets_for, time_us
from engine.kernels.ops import REFERENCE, TRITON, Op

Trial = dict[str, Any]
CROWDED = "no memory beside the others"
"""Is checked again, alone."""
UNCHECKED = "no time left to check it"
_MOST_BYTES = 40 << 30
"""Of all sets of inputs on the device."""
NOTE = f"""one process; median and 90th percentile of {REPLAYS} graph replays, or as many as half a second has and at least \
five, over rotating inputs; right ones only; limits measured in the run; copy_share, fp8_share: bytes and operations over \
the measured copy and fp8 rates; peers: random inputs of as many rows; torch_compile_launched: why its time is that of \
launches without a recording"""


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


def wrong_with(trial: Trial) -> str | None:
    """Check a trial, where it says so at another size, and compile all that is timed; None says it is right."""
    case, size = case_of(trial), trial["size"]
    try:
        provider = provider_named(trial.get("vendor"))
        with shaped(trial):
            if wrong := check(case, trial.get("check", size), "cuda", seed=7, provider=provider):
                return wrong
            if "check" in trial:
                inputs = case.make(torch.Generator("cuda").manual_seed(1), size)
                TRITON.load(case.op)(*inputs.args, **inputs.keywords)
        if trial.get("compiled"):
            inputs = case.make(torch.Generator("cuda").manual_seed(1), size)
            peer(lambda: compiled_us(REFERENCE.load(case.op), [(inputs.args, inputs.keywords)]))
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return CROWDED
    except Exception as error:  # noqa: BLE001 - a shape that does not compile is a result
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        # Others check beside this process.
        gc.collect()
        torch.cuda.empty_cache()
    return None


def timed(trial: Trial, limits: dict[str, float], without: tuple[str, ...]) -> dict[str, object]:
    """Return microseconds of one call, its floor, and for the shape as it is what peers take, but those named so."""
    case, size, provider = case_of(trial), trial["size"], provider_named(trial.get("vendor"))
    generator = torch.Generator("cuda").manual_seed(1)
    before = torch.cuda.memory_allocated()
    first = case.make(generator, size)
    fitting = _MOST_BYTES // max(1, torch.cuda.memory_allocated() - before)
    count = max(1, min(sets_for(first.least_bytes), fitting))
    inputs = [first, *(case.make(generator, size) for _ in range(count - 1))]

    def us_of(kernel: Op) -> tuple[float, float]:
        return time_us([lambda i=i: kernel(*i.args, **i.keywords) for i in inputs], REPLAYS, 0.5)

    with shaped(trial):
        us, p90 = us_of(provider.load(case.op))
    row: dict[str, object] = {} if provider is TRITON else {"ours_us": us_of(TRITON.load(case.op))[0]}
    floor = max(first.least_bytes / limits["copy"], first.flops / limits["bf16"]) * 1e6
    row |= {"us": us, "us_p90": p90, "least_bytes": first.least_bytes, "flops": first.flops, "floor_us": floor,
            "of_limit": floor / us, "copy_share": first.least_bytes / limits["copy"] * 1e6 / us,
            "fp8_share": first.flops / limits["fp8"] * 1e6 / us, "input_sets": len(inputs)}  # fmt: skip
    for name, run in ({} if trial["set"] else PEERS.get(case.op, {})).items():
        if not name.startswith(without):
            row[name] = peer(lambda run=run: run(inputs, size))
    if trial.get("compiled"):
        found = peer(lambda: compiled_us(REFERENCE.load(case.op), [(i.args, i.keywords) for i in inputs[:4]]))
        row |= found if isinstance(found, dict) else {"torch_compile_us": found}
    return row


def shown(row: dict[str, object]) -> str:
    hidden = ("least_bytes", "flops", "set", "check", "compiled")
    numbers = {
        k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k not in hidden or (k == "set" and v)
    }
    return " ".join(f"{k}={v}" for k, v in numbers.items())


def check_share(trials: list[Trial], out: Path) -> None:
    """Compile and check trials, one line each."""
    with out.open("w") as file:
        for trial in trials:
            file.write(json.dumps(wrong_with(trial)) + "\n")
            file.flush()


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
        found: list[str | None] = [UNCHECKED] * len(trials)
        for worker, out, process in started:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for number, line in enumerate(out.read_text().splitlines() if out.exists() else []):
                found[worker + number * workers] = json.loads(line)
        return found


def trials_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what is told to all that run trials."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--without", default="", help="peers whose names begin so, with commas between")
    parser.add_argument("--checks", type=Path, help="what is wrong: made and nothing timed, or read if it is there")
    return parser


def run_trials(trials: list[Trial], options: argparse.Namespace) -> int:
    """Check and time trials, and write the record again after each; returns 1 if one is wrong or failed."""
    without = tuple(filter(None, options.without.split(",")))
    begun = time.monotonic()
    if kept := options.checks and options.checks.exists():
        wrong = json.loads(options.checks.read_text())
    else:
        wrong = checked(trials, options.workers, options.seconds * (1 if options.checks else 0.6))
        print(f"checked in {time.monotonic() - begun:.0f} s", flush=True)
    if options.checks and not kept:
        options.checks.write_text(json.dumps(wrong))
        return 0
    limits = {"copy": copy_bandwidth(), **matmul_flops()}
    torch.cuda.empty_cache()
    rows: list[dict[str, object]] = []
    for trial, error in zip(trials, wrong, strict=True):
        row: dict[str, object] = dict(trial)
        if error == UNCHECKED or time.monotonic() - begun > options.seconds:
            row["left_out"] = error or "no time left"
        elif error := wrong_with(trial) if error == CROWDED else error:
            row["wrong"] = error
        else:
            try:
                row |= timed(trial, limits, without)
            except Exception as failure:  # noqa: BLE001 - one shape must not cost the others
                row["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
            gc.collect()
            torch.cuda.empty_cache()
        rows.append(row)
        print(shown(row), flush=True)
        write_gpu_record(options.out, options.commit, NOTE, rows, limits_per_s=limits, seconds=time.monotonic() - begun)
    return int(any("wrong" in row or "failed" in row for row in rows))


def main() -> int:
    parser = trials_parser(__doc__)
    parser.add_argument("--share", type=Path, help="for the processes side by side")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    trials: list[Trial] = [trial for file in options.files for trial in json.loads(file.read_text())]
    if options.share:
        check_share(trials, options.share)
        return 0
    return run_trials(trials, options)


if __name__ == "__main__":
    sys.exit(main())
