"""Times calls on a GPU: many of them in one CUDA graph over rotating inputs, so that neither launches nor caches flatter."""

import functools
import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

Args = tuple[tuple[object, ...], Mapping[str, object]]
"""Arguments of one call by position and by name."""

_COLD_BYTES = 256 << 20
"""Inputs rotate over at least this much, several times the second-level cache."""
_MOST_SETS = 24
REPLAYS = 50


def sets_for(num_bytes: int) -> int:
    """Return how many input sets keep the cache cold."""
    return max(1, min(_MOST_SETS, -(-_COLD_BYTES // max(1, num_bytes))))


def _events(run: Callable[[], object], replays: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1000 for begin, end in pairs]


def time_us(
    calls: Sequence[Callable[[], object]], replays: int = REPLAYS, within_s: float = math.inf
) -> tuple[float, float]:
    """Return the median and the 90th percentile in microseconds of one call, measured over replays of all `calls`: as many
    as asked for, or at least five and fewer if those would take longer than `within_s`.
    """
    repeats = max(1, 8 // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    once = min(_events(graph.replay, 3))
    fitting = max(5, int(min(replays, within_s * 1e6 / once)))
    took = sorted(_events(graph.replay, fitting))
    each = repeats * len(calls)
    return statistics.median(took) / each, took[int(0.9 * len(took))] / each


def compiled_us(function: Callable[..., object], calls: Sequence[Args]) -> dict[str, object]:
    """Return what a function takes as `torch.compile` makes it: by a recording, or with its launches where it has none."""
    torch.compiler.reset()
    # Errors of a compiler in a process of its own do not say what is wrong.
    importlib.import_module("torch._inductor.config").compile_threads = 1
    compiled = torch.compile(function, dynamic=False)
    runs = [functools.partial(compiled, *args, **keywords) for args, keywords in calls]
    for run in runs:
        run()
    torch.cuda.synchronize()
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    try:
        # A call that waits for the device cannot be recorded, and trying that leaves the process with a broken recording.
        torch.cuda.set_sync_debug_mode("error")
        runs[0]()
        torch.cuda.set_sync_debug_mode(mode)
        return {"torch_compile_us": time_us(runs, 20, 0.5)[0]}
    except Exception as error:  # noqa: BLE001 - whatever it is, the function ran before
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        took = statistics.median(_events(lambda: [run() for run in runs], 20)) / len(runs)
        return {"torch_compile_us": took, "torch_compile_launched": f"not recorded: {str(error)[:160]}"}


def copy_bandwidth() -> float:
    """Return bytes per second, read plus written, of a large device-to-device copy."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    eager = statistics.median(_events(lambda: target.copy_(source), 10))
    captured, _ = time_us([lambda: target.copy_(source)], 10)
    return 2 * source.numel() * source.element_size() / min(eager, captured) * 1e6


def matmul_flops() -> dict[str, float]:
    """Return flops per second of a large bfloat16 and a large fp8 product through the vendor's library."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    bf16, _ = time_us([lambda: a @ b], 10)
    one = torch.ones((), device="cuda")
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    fp8, _ = time_us([lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)], 10)  # noqa: SLF001
    return {"bf16": 2 * n**3 / bf16 * 1e6, "fp8": 2 * n**3 / fp8 * 1e6}
