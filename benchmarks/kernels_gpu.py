"""Checks and times every kernel on a GPU beside its limit and its peers, and writes one record.

``python -m benchmarks.kernels_gpu --out kernels.json [--compiled] [op ...]``: correctness at the real sizes first (a
kernel that is wrong is not timed), then microseconds, share of the limit, `torch.compile` of the reference, and the
public kernels that are installed. The limit is the larger of bytes over the copy bandwidth and operations over the matrix
rate, both measured in the same run.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.engine_parts import write_gpu_record
from benchmarks.kernel_case import Case
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_checks import check, provider_named, serves
from benchmarks.kernel_peers import PEERS
from benchmarks.kernel_timing import REPLAYS, copy_bandwidth, matmul_flops, sets_for, time_us
from engine.kernels.ops import REFERENCE, TRITON, Provider

HOST_LOOPS = frozenset({"experts_up", "experts_down", "sort_routes", "paged_attention"})
"""Ops whose reference loops over sequences or experts on the host, which no compiler fuses."""


def measured(
    case: Case, size: dict[str, int], limits: dict[str, float], *, compiled: bool, provider: Provider = TRITON
) -> dict[str, object]:
    """Check and time one op of a provider at one size."""
    row: dict[str, object] = {"op": case.op, "size": size}
    if wrong := check(case, size, "cuda", seed=time.perf_counter_ns(), provider=provider):
        return row | {"wrong": wrong}
    generator = torch.Generator("cuda").manual_seed(1)
    first = case.make(generator, size)
    inputs = [first, *(case.make(generator, size) for _ in range(sets_for(first.least_bytes) - 1))]
    floor = max(first.least_bytes / limits["copy"], first.flops / limits["bf16"]) * 1e6
    kernel = provider.load(case.op)
    if provider is not TRITON:
        ours = TRITON.load(case.op)
        row |= {
            "provider": provider.name,
            "ours_us": time_us([lambda i=i: ours(*i.args, **i.keywords) for i in inputs])[0],
        }
    us, p90 = time_us([lambda i=i: kernel(*i.args, **i.keywords) for i in inputs])
    row |= {"us": us, "us_p90": p90, "least_bytes": first.least_bytes, "flops": first.flops, "floor_us": floor,
            "of_limit": floor / us, "copy_share": first.least_bytes / limits["copy"] * 1e6 / us, "input_sets": len(inputs)}  # fmt: skip
    if compiled and size == case.large[-1] and case.op not in HOST_LOOPS:
        row["torch_compile_us"] = peer(lambda: _compiled(case, inputs))
    for name, run in PEERS.get(case.op, {}).items():
        row[name] = peer(lambda run=run: run(inputs, size))
    return row


def _compiled(case: Case, inputs: list) -> float:
    torch.compiler.reset()
    function = torch.compile(REFERENCE.load(case.op), dynamic=False)
    function(*inputs[0].args, **inputs[0].keywords)
    return time_us([lambda i=i: function(*i.args, **i.keywords) for i in inputs[:4]], 20)[0]


def peer(run: Callable[[], object]) -> object:
    """Return a peer's microseconds, or why it did not run."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - a peer that fails is a row, not the end
        torch.cuda.synchronize()
        return f"did not run: {type(error).__name__}: {str(error)[:200]}"


def shown(row: dict[str, object]) -> str:
    numbers = {
        k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k not in ("least_bytes", "flops")
    }
    return " ".join(f"{k}={v}" for k, v in numbers.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--vendor", help="time this package's kernels beside ours")
    parser.add_argument("ops", nargs="*")
    options = parser.parse_args()
    provider = provider_named(options.vendor)
    begun = time.perf_counter()
    limits = {"copy": copy_bandwidth(), **matmul_flops()}
    torch.cuda.empty_cache()
    print("limits", {k: f"{v:.4g}" for k, v in limits.items()}, flush=True)
    rows: list[dict[str, object]] = []
    note = f"one process; median and 90th percentile of {REPLAYS} graph replays over rotating inputs; limits measured in the run"
    for case in CASES:
        wanted = serves(provider, case.op) and case.op in (options.ops or (case.op,))
        for size in case.large if wanted else ():
            try:
                rows.append(measured(case, size, limits, compiled=options.compiled, provider=provider))
            except Exception:  # noqa: BLE001 - one kernel's failure must not cost the others' run
                rows.append({"op": case.op, "size": size, "failed": traceback.format_exc()[-1500:]})
            print(shown(rows[-1]), flush=True)
            seconds = time.perf_counter() - begun
            write_gpu_record(options.out, options.commit, note, rows, limits_per_s=limits, seconds=seconds)
    return 1 if any("wrong" in row or "failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
