"""What a GPU has not run yet, in the order of what it is worth: one call for the next machine that is lent.

``python -m benchmarks.engine_session --out DIR [--commit HASH] [--seconds 560] [--gpus 1] [step ...]``: each step is a
benchmark of its own with a limit of time and writes its own record; one that fails or is cut off does not stop the others,
one that no longer fits is left out and named. Whoever has run a step takes it out here and from docs/kernels.md.
"""

import argparse
import contextlib
import subprocess
import sys
import time
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
    """File that it writes; told by --out where a benchmark has one record a call."""
    gpus: int = 1

    def command(self, out: Path, commit: str) -> list[str]:
        """Return what runs it."""
        where = out / self.record if self.module in ("kernels_gpu", "kernel_trials") else out
        return [
            sys.executable,
            "-m",
            f"benchmarks.{self.module}",
            "--out",
            str(where),
            "--commit",
            commit,
            *self.arguments,
        ]


STEPS = (
    # Right at all: every op of whole steps twice and beside its reference, layers, and batches against one shot.
    Step("right", 170, "v41_gpu", ("shadow", "layers", "batches"), "v41_h200.json"),
    # Correct at all, at the real sizes: whatever was edited behind the last run.
    Step("edited", 150, "kernels_gpu", ("engram_gate", "engram_lookup", "block_scores", "commit_ring",
         "stream_coefficients", "experts_up", "experts_down"), "kernels_edited.json"),
    # Shapes that nobody has timed with the bodies as they are, beside cuBLAS and FlashMLA where those are installed.
    Step("trials", 160, "kernel_trials", ("--seconds", "140", "--without", "deep_gemm", "benchmarks/trials_v41.json"),
         "kernels_trials.json"),
    Step("tiny", 60, "v41_gpu", ("tiny",), "v41_h200.json"),
    # DSpark's steps per second with real and golden acceptance, drafts and verify steps recorded.
    Step("dspark", 120, "v41_gpu", ("loop",), "v41_h200.json"),
    Step("hand-over", 200, "handover_gpu", ("--models", "tiny-llama", "v41-mini", "--parts", "tokens", "kill"),
         "handover_h200_x1.json"),
    # The references of these two loop on the host no more: torch.compile is a peer now.
    Step("compiled", 120, "kernels_gpu", ("--compiled", "index_scores", "sparse_attention"), "kernels_compiled.json"),
    Step("steps", 240, "v41_gpu", ("mini", "slice"), "v41_h200.json"),
    Step("deep_gemm", 60, "kernels_gpu", ("--vendor", "deep_gemm"), "kernels_deep_gemm.json"),
    Step("flash_mla", 60, "kernels_gpu", ("--vendor", "flash_mla"), "kernels_flash_mla.json"),
    Step("table", 120, "handover_gpu", ("--gpus", "2", "--parts", "table"), "handover_h200_x2.json", gpus=2),
)  # fmt: skip


def seconds_for(step: Step, left: float) -> float:
    """Return the seconds that a step may take when so many are left, 0 if it would be cut off halfway."""
    return min(step.limit_s, left) if left >= step.limit_s / 2 else 0.0


def ran(command: list[str], limit: float) -> int:
    """Run a command for at most so many seconds; returns its exit status, 124 if it had to be ended."""
    process = subprocess.Popen(command)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=560.0, help="what this machine is lent for")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("steps", nargs="*", default=[step.name for step in STEPS])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begun, failed = time.monotonic(), 0
    for step in STEPS:
        if step.name not in options.steps or step.gpus > options.gpus:
            continue
        limit = seconds_for(step, options.seconds - (time.monotonic() - begun))
        if not limit:
            print(f"== {step.name}: left out, too little time", flush=True)
            continue
        # A part of the same benchmark writes the same record: each step has a folder.
        folder = options.out / step.name
        folder.mkdir(exist_ok=True)
        since = time.monotonic()
        code = ran(step.command(folder, options.commit), limit)
        failed += code != 0
        kept = "written" if (folder / step.record).exists() else "missing"
        print(f"== {step.name}: {code}, {time.monotonic() - since:.0f} s, record {kept}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
