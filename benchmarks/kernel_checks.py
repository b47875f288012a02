"""Checks kernels against their references: poisoned outputs, edge shapes, fresh inputs; prints what is wrong.

`--small` runs the sizes for CI, on a CPU under TRITON_INTERPRET=1; without it the real sizes, on a GPU. Names choose ops.
"""

import argparse
import sys
import time
from unittest.mock import patch

import torch

from benchmarks import kernel_interpreter
from benchmarks.kernel_case import Case, Inputs
from benchmarks.kernel_cases import CASES
from engine.kernels import chip
from engine.kernels.ops import REFERENCE, TRITON, Op


def outputs_of(function: Op, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Run an op; return what it returned, then what it wrote into."""
    result = function(*inputs.args)
    returned = () if result is None else (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return (*returned, *(inputs.args[i] for i in inputs.written))  # type: ignore[return-value]


def check(case: Case, size: dict[str, int], device: str, seed: int = 0) -> str | None:
    """Return what is wrong with an op at a size; fresh memory is poisoned with NaN while the kernel runs."""
    inputs = case.make(torch.Generator(device).manual_seed(seed), size)
    want = outputs_of(REFERENCE.load(case.op), inputs.copied())
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        got = outputs_of(TRITON.load(case.op), inputs.copied())
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert len(got) == len(want) == len(case.checks), (len(got), len(want), len(case.checks))
    for i, (compare, a, b) in enumerate(zip(case.checks, got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {i} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if wrong := compare(a, b):
            return f"output {i}: {wrong}"
    return case.consistent(got)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("ops", nargs="*")
    options = parser.parse_args()
    if options.small:
        kernel_interpreter.install()
    failures = 0
    for case in CASES:
        if options.ops and case.op not in options.ops:
            continue
        for size in case.small if options.small else case.large:
            begun = time.perf_counter()
            wrong = check(case, size, "cpu" if options.small else "cuda")
            print(f"{case.op} {size} {wrong or 'ok'} ({time.perf_counter() - begun:.1f} s)", flush=True)
            failures += wrong is not None
        if case.by_chip and options.small:
            with patch.object(chip, "has_tensor_memory", lambda _: True):
                wrong = check(case, case.small[0], "cpu")
            print(f"{case.op} with tensor memory {case.small[0]} {wrong or 'ok'}", flush=True)
            failures += wrong is not None
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
