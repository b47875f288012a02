"""Decode steps of one rank of V4.1 on a GPU, all 40 layers at the real widths: its share of experts, verified tokens, 128K.

A rank's experts are all the experts there are and a token has six of them, so that each expert has the rows that the other
ranks' requests would send. What else is smaller than the real model is said in the record.

``python -m benchmarks.v41_slices --out FILE [--seconds 155] [--most 256] S2``: S2 is a rank of 64, S3 one of 8.
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_parts import write_gpu_record
from benchmarks.kernel_timing import copy_bandwidth, matmul_flops
from benchmarks.v41_driver import RowsDriver, captured
from benchmarks.v41_steps import floor_bytes, kernels_of, model_of, slice_config
from engine.cache.kv_memory import region_sizes
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.model import DeviceDeepseekModel
from engine.models.deepseek_v41.device.parts import ModelParts, memory_bytes, tensors_of

CONTEXT = 131_072
SIZES = ((64, 4), (8, 4), (256, 4), (64, 6))
"""Requests, tokens that each verifies."""
_REPLAYS, _MOST_REPLAYS, _WITHIN_S = 500, 1000, 10.0
_EAGER, _FIXED = 60, 100
RANKS = {"S2": 7, "S3": 48}
"""Experts of a rank of 64 (384 and 64 copies) and of 8."""
NOTE = (
    "one rank, no dispatch and combine: its experts are all there are, a token has six of them, so that they have the rows "
    "that all ranks' requests would send; gate of these experts only; n-gram tables of 0.5 million rows; random weights "
    "and KV; microseconds by events around each step, steps issued one behind the other; eager: launch by launch; "
    "floor: the larger of the bytes that must be read over the copy rate and the products over the bfloat16 rate"
)


def rank_config(experts: int) -> dict[str, Any]:
    """Return the real model's 40 layers with so many experts in each."""
    config = slice_config()
    real = {
        "num_hidden_layers": 40, "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20, "engram_layer_ids": [1, 14], "engram_head_dim": 256,
        "dspark_target_layer_ids": [37, 38, 39], "n_routed_experts": experts,
    }  # fmt: skip
    return {**config, "text_config": {**config["text_config"], **real}}


def product_flops(config: V41Config, parts: ModelParts, rows: int, each: int) -> float:
    """Return the operations of a step's products of matrices: dense weights, six experts a token, attention, logits."""

    def size(parts: object) -> int:
        return sum(t.numel() for t in tensors_of(parts) if t.ndim > 1)

    weights = parts.head.numel()
    for layer in parts.layers:
        experts = layer.moe.w13, layer.moe.w2
        weights += size(layer) - size(experts) - (size(layer.engram.table) if layer.engram else 0)
        codes = sum(t.nbytes for some in experts for t in some.codes)
        weights += 2 * codes * config.moe.top_k // config.moe.num_experts
    keys = sum(config.window + (config.index.top_k if layer.m else 0) for layer in config.layers)
    return 2.0 * rows * each * (weights + 2 * keys * config.num_heads * config.head_dim)


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest of some values."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "max": ordered[-1]}


def streak(run: Callable[[], object], count: int) -> dict[str, Any]:
    """Issue calls one behind the other: microseconds of each and between them on the device, and on the host of one."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    issued = time.perf_counter() - begun
    torch.cuda.synchronize()
    took = [begin.elapsed_time(end) * 1e3 for begin, end in marks]
    gaps = [end.elapsed_time(begin) * 1e3 for (_, end), (begin, _) in itertools.pairwise(marks)]
    return {"steps": count, "us": percentiles(took), "gap_us": percentiles(gaps), "host_us": issued / count * 1e6,
            "wall_us": (time.perf_counter() - begun) / count * 1e6}  # fmt: skip


def compile_steps(experts: int, most: int) -> None:
    """Run every step of up to so many requests once, so that the next process finds all kernels compiled."""
    model, _ = model_of(rank_config(experts))
    for requests, each in (size for size in SIZES if size[0] <= most):
        # Others do the same beside this process.
        gc.collect()
        torch.cuda.empty_cache()
        driver = RowsDriver(model, requests, CONTEXT + 256)
        for fixed in (False, True):
            driver.run(driver.decoding(requests, CONTEXT, each, fixed=fixed))


def measured(
    model: DeviceDeepseekModel,
    parts: ModelParts,
    rows: int,
    each: int,
    limits: dict[str, float],
    context: int = CONTEXT,
) -> dict[str, object]:
    """Time the step of `rows` requests that verify `each` tokens, recorded and launch by launch."""
    driver = RowsDriver(model, rows, context + 256, random_kv=True)
    batch = driver.decoding(rows, context, each)
    begun = time.perf_counter()
    driver.run(batch)
    torch.cuda.synchronize()
    row: dict[str, object] = {
        "requests": rows, "tokens_each": each, "context": context, "kv_bytes": sum(region_sizes(driver.layout)),
        "first_s": time.perf_counter() - begun, "eager": streak(lambda: driver.run(batch), _EAGER),
    }  # fmt: skip
    graph, _ = captured(driver, batch)
    for _ in range(3):
        graph.replay()
    once = streak(graph.replay, 10)["wall_us"]
    count = max(_REPLAYS, min(_MOST_REPLAYS, int(_WITHIN_S * 1e6 / once)))
    recorded = streak(graph.replay, count)
    moved = floor_bytes(model.config, parts, rows, each, context) / limits["copy"] * 1e6
    products = product_flops(model.config, parts, rows, each) / limits["bf16"] * 1e6
    took = recorded["us"]["p50"]
    row |= {"recorded": recorded, "bytes_us": moved, "products_us": products, "of_floor": max(moved, products) / took,
            "tokens_per_s": rows * each / took * 1e6}  # fmt: skip
    print({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    row["kernels"] = kernels_of(graph.replay)
    graph, _ = captured(driver, driver.decoding(rows, context, each, fixed=True))
    graph.replay()
    row["deterministic"] = streak(graph.replay, _FIXED)
    print(f"deterministic {row['deterministic']['us']}", flush=True)
    return row


def rank(experts: int, options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure the steps of a rank with so many experts of each layer; `write` gets the result again after each size."""
    begun = time.monotonic()
    limits = {"copy": copy_bandwidth(), **matmul_flops()}
    torch.cuda.empty_cache()
    model, parts = model_of(rank_config(experts))
    torch.cuda.empty_cache()
    rows: list[dict[str, object]] = []
    result: dict[str, Any] = {"experts": experts, "layers": len(model.config.layers), "limits_per_s": limits,
                                 "weights_bytes": memory_bytes(parts), "decode": rows}  # fmt: skip
    print(f"{result} after {time.monotonic() - begun:.0f} s", flush=True)
    for requests, each in (size for size in SIZES if size[0] <= options.most):
        size: dict[str, object] = {"requests": requests, "tokens_each": each}
        try:
            in_time = time.monotonic() - begun < options.seconds
            rows.append(
                measured(model, parts, requests, each, limits) if in_time else size | {"left_out": "no time left"}
            )
        except Exception as error:  # noqa: BLE001 - one size's failure must not cost the others
            rows.append(size | {"failed": f"{type(error).__name__}: {str(error)[:400]}"})
            print(rows[-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        write(result)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=155.0)
    parser.add_argument("--most", type=int, default=256, help="requests of a step")
    parser.add_argument("--compile", action="store_true", help="only that")
    parser.add_argument("slice", choices=tuple(RANKS))
    options = parser.parse_args()
    if options.compile:
        compile_steps(RANKS[options.slice], options.most)
        return 0
    result = rank(
        RANKS[options.slice], options, lambda found: write_gpu_record(options.out, options.commit, NOTE, found)
    )
    return int(any("failed" in row for row in result["decode"]))


if __name__ == "__main__":
    sys.exit(main())
