"""Times calls on a GPU: many of them in one CUDA graph over rotating inputs, so that neither launches nor caches flatter."""

import statistics
from collections.abc import Callable, Sequence

import torch

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


def time_us(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> tuple[float, float]:
    """Return the median and the 90th percentile in microseconds of one call, measured over replays of all `calls`."""
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
    for _ in range(3):
        graph.replay()
    took = sorted(_events(graph.replay, replays))
    each = repeats * len(calls)
    return statistics.median(took) / each, took[int(0.9 * len(took))] / each


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
