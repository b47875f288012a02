"""The design's suite of kernels and of slices of a rank in one call, for a machine that is lent for minutes.

``python -m benchmarks.engine_session --out DIR [--commit HASH] [--seconds 560] [--gpus 1] [step ...]``: each step is a
benchmark of its own with a limit of time and writes its own record; one that fails or is cut off does not stop the others,
one that no longer fits is left out and named. What is not timed, compiling and checking, all steps do first, side by side.
Of several GPUs each takes the next step when it has done one.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark."""

    name: str
    limit_s: int
    module: str
    arguments: tuple[str, ...]
    record: str
    """File that it writes."""

    def command(self, out: Path, commit: str, *, ahead: bool = False) -> list[str]:
        """Return what runs it, or only what it does ahead."""
        ways = {"v41_slices": ("--compile",) if ahead else ()}
        return [
            sys.executable,
            "-m",
            f"benchmarks.{self.module}",
            "--out",
            str(out / self.record),
            "--commit",
            commit,
            *ways.get(self.module, ("--workers", "8", "--checks", str(out / "checks.json"))),
            *self.arguments,
        ]


STEPS = (
    Step("S2", 150, "v41_slices", ("--seconds", "135", "S2"), "v41_s2.json"),
    Step("S3", 150, "v41_slices", ("--seconds", "135", "S3"), "v41_s3.json"),
    Step("experts", 150, "kernels_k", ("--seconds", "145", "K1"), "kernels_k1.json"),
    Step("compiled", 150, "kernels_k", ("--seconds", "145", "compiled"), "kernels_compiled.json"),
    Step("deep_gemm", 60, "kernels_gpu", ("--seconds", "55", "--vendor", "deep_gemm"), "kernels_deep_gemm.json"),
    Step("flash_mla", 60, "kernels_gpu", ("--seconds", "55", "--vendor", "flash_mla"), "kernels_flash_mla.json"),
    Step("attention", 150, "kernels_k", ("--seconds", "145", "K2"), "kernels_k2.json"),
    Step("prompts", 120, "kernels_k", ("--seconds", "115", "K4"), "kernels_k4.json"),
    Step("scans", 120, "kernels_k", ("--seconds", "115", "K3"), "kernels_k3.json"),
    Step("surroundings", 120, "kernels_k", ("--seconds", "115", "K5"), "kernels_k5.json"),
)


def seconds_for(step: Step, left: float) -> float:
    """Return the seconds that a step may take when so many are left, 0 if it would be cut off halfway."""
    return min(step.limit_s, left) if left >= step.limit_s / 2 else 0.0


def ran(command: list[str], limit: float, gpu: int = 0) -> int:
    """Run a command on one GPU for at most so many seconds; returns its exit status, 124 if it had to be ended."""
    process = subprocess.Popen(["env", f"CUDA_VISIBLE_DEVICES={gpu}", *command])
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        # Asked first: clusters end with the benchmark that started them.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        process.kill()
        process.wait()
        return 124


def do_ahead(steps: list[Step], options: argparse.Namespace) -> None:
    """Let all steps compile and check side by side, for the limit of the longest."""
    begun = time.monotonic()
    with ThreadPoolExecutor(len(steps)) as pool:
        for number, step in enumerate(steps):
            folder = options.out / step.name
            folder.mkdir(exist_ok=True)
            command = step.command(folder, options.commit, ahead=True)
            pool.submit(ran, command, max(step.limit_s for step in steps), number % options.gpus)
    print(f"== ahead: {time.monotonic() - begun:.0f} s", flush=True)


def run_steps(steps: list[Step], options: argparse.Namespace, begun: float, gpu: int) -> int:
    """Take steps from the front of a list that other GPUs take from, too, until it is empty; returns how many failed."""
    failed = 0
    while steps:
        step = steps.pop(0)
        limit = seconds_for(step, options.seconds - (time.monotonic() - begun))
        if not limit:
            print(f"== {step.name}: left out, too little time", flush=True)
            continue
        # A part of the same benchmark writes the same record: each step has a folder.
        folder = options.out / step.name
        since = time.monotonic()
        code = ran(step.command(folder, options.commit), limit, gpu)
        failed += code != 0
        kept = "written" if (folder / step.record).exists() else "missing"
        print(f"== {step.name}: {code}, {time.monotonic() - since:.0f} s, record {kept}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=560.0, help="what this machine is lent for")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("steps", nargs="*", default=[step.name for step in STEPS])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    steps = [step for step in STEPS if step.name in options.steps]
    do_ahead(steps, options)
    with ThreadPoolExecutor(options.gpus) as pool:
        lanes = [pool.submit(run_steps, steps, options, begun, gpu) for gpu in range(options.gpus)]
        return min(sum(lane.result() for lane in lanes), 1)


if __name__ == "__main__":
    sys.exit(main())
