"""Times of V4.1 steps on a GPU beside what moving their bytes takes: decode and verify, recorded and eager, and prefill.

Shapes: `v41-mini`, and a slice of the real sizes (hidden 5120, 64 heads, 48 of 384 experts: one rank of eight) with 14
layers, random weights. A floor is the bytes that a step must read (weights, experts hit, windows, entries, index keys)
over the copy bandwidth of the same run.
"""

import statistics
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from benchmarks.kernel_timing import copy_bandwidth, matmul_flops
from benchmarks.v41_driver import RowsDriver, captured
from benchmarks.v41_equality import GPU, facts_of
from benchmarks.v41_parts import RandomParts
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.drafting import DraftingDeviceModel
from engine.models.deepseek_v41.device.model import DeviceDeepseekModel
from engine.models.deepseek_v41.device.parts import LayerParts, ModelParts, memory_bytes, tensors_of
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config

REPLAYS = 30
DECODE = ((8, 1, 4096), (64, 1, 4096), (256, 1, 4096), (8, 6, 4096), (8, 1, 32768))
"""Rows, tokens each, tokens in KV before."""
PREFILL = (256, 2048, 8192)
PROFILED = ((8, 1, 4096), (64, 1, 4096), (256, 1, 4096))


def slice_config() -> dict[str, Any]:
    """Return the real model's widths with the layer map of `v41-mini`, and an eighth of its experts."""
    config = mini_config()
    wide = {
        "vocab_size": 129_280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_attention_heads": 64,
        "q_lora_rank": 1280, "o_lora_rank": 1024, "n_routed_experts": 48, "num_experts_per_tok": 6,
        "candidate_topk_blocks": 2048, "dspark_n_routed_experts": 16, "dspark_num_experts_per_tok": 3,
        "dspark_markov_rank": 256, "dspark_noise_token_id": 128_799,
    }  # fmt: skip
    return {**config, "image_token_id": 129_264, "text_config": {**config["text_config"], **wide}}


def floor_bytes(config: V41Config, parts: ModelParts, rows: int, each: int, length: int) -> float:
    """Return the bytes that a step must read: weights once, experts that are hit, and its rows' KV."""
    tokens = rows * each
    hit = 1 - (1 - config.moe.top_k / config.moe.num_experts) ** tokens

    def held(layer: LayerParts) -> float:
        moe = layer.moe
        experts = sum(part.nbytes for part in tensors_of((moe.w13, moe.w2)))
        tables = sum(t.nbytes for t in tensors_of(layer.engram.table)) if layer.engram else 0
        return sum(t.nbytes for t in tensors_of(layer)) - experts - tables + experts * hit

    total = sum(map(held, parts.layers)) + parts.head.nbytes
    window = config.head_dim * 33 // 32
    total += rows * len(config.layers) * (config.window + each - 1) * window
    for layer in config.layers:
        if layer.m:
            total += tokens * min(config.index.top_k, length // layer.m) * (config.head_dim * 9 // 16)
        if layer.owns_index_query and length // layer.m > config.index.top_k:
            scanned = rows * (length // layer.m)
            if layer.uses_candidates and (rules := config.candidates):
                scanned = min(scanned, tokens * rules.top_blocks * rules.block_size)
            total += scanned * (config.index.head_dim * 17 // 32)
    return total


def _events(run: Any, count: int) -> float:
    """Return the median microseconds of one call."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3


def decode(driver: RowsDriver, parts: ModelParts, size: tuple[int, int, int], copy: float) -> dict[str, object]:
    """Time one step eagerly and recorded."""
    rows, each, length = size
    batch = driver.decoding(rows, length, each)
    driver.run(batch)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(5):
        driver.run(batch)
    issued = (time.perf_counter() - begun) / 5 * 1e6
    torch.cuda.synchronize()
    eager = (time.perf_counter() - begun) / 5 * 1e6
    before = torch.cuda.memory_reserved()
    begun = time.perf_counter()
    graph, _ = captured(driver, batch)
    recorded_s = time.perf_counter() - begun
    graph.replay()
    step = _events(graph.replay, REPLAYS)
    fixed, _ = captured(driver, driver.decoding(rows, length, each, fixed=True))
    fixed.replay()
    fixed_step = _events(fixed.replay, REPLAYS)
    floor = floor_bytes(driver.model.config, parts, rows, each, length) / copy * 1e6
    row: dict[str, object] = {
        "rows": rows, "tokens_each": each, "context": length, "recorded_us": step, "eager_us": eager,
        "eager_host_us": issued, "floor_us": floor, "of_floor": floor / step, "deterministic_us": fixed_step, "recording_s": recorded_s,
        "graph_mib": (torch.cuda.memory_reserved() - before) / 2**20,
    }  # fmt: skip
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def kernels_of(run: Callable[[], object]) -> list[dict[str, object]]:
    """Return where the device's time of a step goes, most first."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=attrgetter("device_time_total"), reverse=True)
    rows = [{"kernel": e.key[:60], "us": e.device_time_total / 3, "calls": e.count / 3} for e in found[:16]]
    rest = sum(e.device_time_total for e in found[16:]) / 3
    rows.append({"kernel": "all others", "us": rest, "calls": sum(e.count for e in found[16:]) / 3})
    for row in rows:
        print(f"  {row['us']:9.1f} us {row['calls']:6.1f} x {row['kernel']}", flush=True)
    return rows


def prefill(driver: RowsDriver, parts: ModelParts, tokens: int, flops: float) -> dict[str, object]:
    """Time one chunk of one prompt."""
    config = driver.model.config
    ids = [(7 * i) % (config.vocab_size - 4) + 3 for i in range(tokens)]
    batch, fixed = (driver.batch([0], [0], [ids], [[-1, -1, -1]], fixed=fixed) for fixed in (False, True))
    for each in (batch, fixed):
        driver.run(each)
    us, fixed_us = (_events(lambda each=each: driver.run(each), 5) for each in (batch, fixed))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    driver.run(batch)
    issued_ms = (time.perf_counter() - begun) * 1e3
    experts = config.moe.top_k * 3 * config.hidden_size * config.moe.inner_size
    dense = sum(
        t.nbytes for layer in parts.layers for p in (layer.attn, layer.moe.shared_w13, layer.moe.shared_w2)
        for t in tensors_of(p) if t.dtype == torch.uint8
    )  # fmt: skip
    work = 2.0 * tokens * (dense + len(config.layers) * experts)
    attended = sum(min(config.window + (config.index.top_k if layer.m else 0), tokens) for layer in config.layers)
    work += 4.0 * tokens * attended * config.num_heads * config.head_dim
    row: dict[str, object] = {"tokens": tokens, "ms": us / 1e3, "deterministic_ms": fixed_us / 1e3,
                              "host_ms": issued_ms, "tokens_per_s": tokens / us * 1e6,
                              "tflops": work / us / 1e6, "of_bf16_peak": work / us * 1e6 / flops}  # fmt: skip
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    row["kernels"] = kernels_of(lambda: driver.run(batch))
    return row


def model_of(raw: dict[str, Any]) -> tuple[DeviceDeepseekModel, ModelParts]:
    """Return a random model on the GPU."""
    config = parse_config(raw)
    parts = RandomParts(config, GPU).model()
    return DraftingDeviceModel(config, parts, facts_of(config)), parts


def steps(raw: dict[str, Any], decoded: tuple[tuple[int, int, int], ...] = DECODE) -> dict[str, object]:
    """Measure one shape."""
    limits = {"copy": copy_bandwidth(), **matmul_flops()}
    torch.cuda.empty_cache()
    print({k: f"{v:.4g}" for k, v in limits.items()}, flush=True)
    model, parts = model_of(raw)
    result: dict[str, object] = {"limits_per_s": limits, "weights_bytes": memory_bytes(parts)}
    print(result["weights_bytes"], flush=True)
    rows: list[dict[str, object]] = []
    for size in decoded:
        driver = RowsDriver(model, size[0], size[2] + 256, random_kv=True)
        try:
            rows.append(decode(driver, parts, size, limits["copy"]))
            if size in PROFILED:
                graph, _ = captured(driver, driver.decoding(size[0], size[2]))
                rows[-1]["kernels"] = kernels_of(graph.replay)
        except Exception as error:  # noqa: BLE001 - one size's failure must not cost the others
            rows.append({"size": size, "failed": f"{type(error).__name__}: {str(error)[:400]}"})
            print(rows[-1], flush=True)
        del driver
        torch.cuda.empty_cache()
    result["decode"] = rows
    driver = RowsDriver(model, 1, max(PREFILL) + 256)
    result["prefill"] = [prefill(driver, parts, tokens, limits["bf16"]) for tokens in PREFILL]
    return result
