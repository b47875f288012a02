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
from engine.config import KernelsConfig
from engine.kernels import chip
from engine.kernels.ops import REFERENCE, TRITON, Op, Provider
from engine.kernels.vendors.table import Vendor, providers_for


def outputs_of(function: Op, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Run an op; return what it returned, then what it wrote into."""
    result = function(*inputs.args, **inputs.keywords)
    returned = () if result is None else (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return (*returned, *(inputs.args[i] for i in inputs.written))  # type: ignore[return-value]


def check(case: Case, size: dict[str, int], device: str, seed: int = 0, provider: Provider = TRITON) -> str | None:
    """Return what is wrong with a provider's op at a size; fresh memory is poisoned with NaN while the kernel runs."""
    inputs = case.make(torch.Generator(device).manual_seed(seed), size)
    want = outputs_of(REFERENCE.load(case.op), inputs.copied())
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        got = outputs_of(provider.load(case.op), inputs.copied())
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert len(got) == len(want) == len(case.checks), (len(got), len(want), len(case.checks))
    for i, (compare, a, b) in enumerate(zip(case.checks, got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {i} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if wrong := compare(a, b):
            return f"output {i}: {wrong}"
    return case.consistent(got)


def provider_named(vendor: str | None) -> Provider:
    """Return a vendor's row, forced; ours without a name. Ends the process if that package cannot run here."""
    if vendor is None:
        return TRITON
    device = torch.device("cuda", 0)
    return providers_for(KernelsConfig(force=(vendor,)), device, deterministic=False)[0]


def serves(provider: Provider, op: str) -> bool:
    """Return whether an op is among a provider's, wherever it runs."""
    return op in provider.ops if isinstance(provider, Vendor) else True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--vendor", help="check this package's kernels, not ours")
    parser.add_argument("ops", nargs="*")
    options = parser.parse_args()
    provider = provider_named(options.vendor)
    if options.small:
        kernel_interpreter.install()
    failures = 0
    for case in CASES:
        if case.op not in (options.ops or (case.op,)) or not serves(provider, case.op):
            continue
        for size in case.small if options.small else case.large:
            begun = time.perf_counter()
            wrong = check(case, size, "cpu" if options.small else "cuda", provider=provider)
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
