"""Checks and times every kernel on a GPU beside its limit and its peers, and writes one record.

``python -m benchmarks.kernels_gpu --out kernels.json [op ...]``: correctness at the real sizes first (a kernel that is
wrong is not timed), then microseconds, share of the limit, and the public kernels that are installed. The limit is the
larger of bytes over the copy bandwidth and operations over the matrix rate, both measured in the same run.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.engine_parts import write_gpu_record
from benchmarks.kernel_case import Case
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_checks import check, provider_named, serves
from benchmarks.kernel_peers import PEERS, Peer, peer
from benchmarks.kernel_timing import REPLAYS, compiled_us, copy_bandwidth, matmul_flops, sets_for, time_us
from engine.kernels.ops import REFERENCE, TRITON, Op, Provider

Row = dict[str, object]
"""What is known of one op at one size."""

_MOST_BYTES = 40 << 30
"""Of all sets of inputs on the device."""
HALF_S = 0.5


def measured(case: Case, size: dict[str, int], limits: dict[str, float], provider: Provider = TRITON) -> Row:
    """Check and time one op of a provider at one size."""
    row: Row = {"op": case.op, "size": size}
    if wrong := check(case, size, "cuda", seed=time.perf_counter_ns(), provider=provider):
        return row | {"wrong": wrong}
    return row | timed(case, size, limits, provider=provider)


def timed(
    case: Case, size: dict[str, int], limits: dict[str, float], *,
    provider: Provider = TRITON, peers: Mapping[str, Peer] | None = None, compiled: bool = False,
) -> Row:  # fmt: skip
    """Time one op of a provider at one size beside its limit and its peers (all, if none are named)."""
    generator = torch.Generator("cuda").manual_seed(1)
    before = torch.cuda.memory_allocated()
    first = case.make(generator, size)
    fitting = _MOST_BYTES // max(1, torch.cuda.memory_allocated() - before)
    count = max(1, min(sets_for(first.least_bytes), fitting))
    inputs = [first, *(case.make(generator, size) for _ in range(count - 1))]

    def us_of(kernel: Op) -> tuple[float, float]:
        return time_us([lambda i=i: kernel(*i.args, **i.keywords) for i in inputs], REPLAYS, HALF_S)

    row: Row = {}
    if provider is not TRITON:
        row |= {"provider": provider.name, "ours_us": us_of(TRITON.load(case.op))[0]}
    us, p90 = us_of(provider.load(case.op))
    floor = max(first.least_bytes / limits["copy"], first.flops / limits["bf16"]) * 1e6
    row |= {"us": us, "us_p90": p90, "least_bytes": first.least_bytes, "flops": first.flops, "floor_us": floor,
            "of_limit": floor / us, "copy_share": first.least_bytes / limits["copy"] * 1e6 / us,
            "fp8_share": first.flops / limits["fp8"] * 1e6 / us, "input_sets": len(inputs)}  # fmt: skip
    for name, run in (PEERS.get(case.op, {}) if peers is None else peers).items():
        row[name] = peer(lambda run=run: run(inputs, size))
    if compiled:
        found = peer(lambda: compiled_us(REFERENCE.load(case.op), [(i.args, i.keywords) for i in inputs[:4]]))
        row |= found if isinstance(found, dict) else {"torch_compile_us": found}
    return row


def shown(row: Row) -> str:
    numbers = {
        k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k not in ("least_bytes", "flops")
    }
    return " ".join(f"{k}={v}" for k, v in numbers.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--vendor", help="time this package's kernels beside ours")
    parser.add_argument("ops", nargs="*")
    options = parser.parse_args()
    provider = provider_named(options.vendor)
    begun = time.perf_counter()
    limits = {"copy": copy_bandwidth(), **matmul_flops()}
    torch.cuda.empty_cache()
    print("limits", {k: f"{v:.4g}" for k, v in limits.items()}, flush=True)
    rows: list[Row] = []
    note = f"one process; median and 90th percentile of {REPLAYS} graph replays, or of half a second, over rotating inputs; limits measured in the run"
    for case in CASES:
        wanted = serves(provider, case.op) and case.op in (options.ops or (case.op,))
        for size in case.large if wanted else ():
            try:
                rows.append(measured(case, size, limits, provider))
            except Exception:  # noqa: BLE001 - one kernel's failure must not cost the others' run
                rows.append({"op": case.op, "size": size, "failed": traceback.format_exc()[-1500:]})
            print(shown(rows[-1]), flush=True)
            seconds = time.perf_counter() - begun
            write_gpu_record(options.out, options.commit, note, rows, limits_per_s=limits, seconds=seconds)
    return 1 if any("wrong" in row or "failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
