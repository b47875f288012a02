"""Times one layer of paged attention on the CPU: the token-by-token reference beside the grouped form that serves.

Shapes of SmolLM2-135M (9 query heads, 3 key-value heads of 64, float32). Each figure is milliseconds per layer and
step, the best of `--repeats`. Knows no model. `--record` keeps the figures.
"""

import argparse
import os
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.record import write_record
from engine.attention.paged import PagedAttention
from engine.batch import ForwardBatch

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 2


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one step: every row has `context` tokens in KV (varied by `spread`) and `query` new ones."""

    name: str
    rows: int
    context: int
    query: int
    spread: float = 0.0


CASES = (
    Case("decode, 1 row, context 256", 1, 256, 1),
    Case("decode, 8 rows, context 256", 8, 256, 1),
    Case("decode, 32 rows, context 256", 32, 256, 1),
    Case("decode, 32 rows, context 32..512", 32, 272, 1, 0.9),
    Case("decode, 32 rows, context 1024", 32, 1024, 1),
    Case("decode, 64 rows, context 128", 64, 128, 1),
    Case("prefill, 1 row of 256 from the start", 1, 0, 256),
    Case("prefill, 1 row of 256 after 1024", 1, 1024, 256),
)


def build(case: Case, page_tokens: int, *, deterministic: bool) -> tuple[ForwardBatch, torch.Tensor]:
    """Return the batch and the KV pages [num_pages, layers, 2, kv_heads, page_tokens, head_dim]."""
    generator = np.random.default_rng(1)
    low, high = case.context * (1 - case.spread), case.context * (1 + case.spread)
    starts = np.linspace(low, high, case.rows).astype(np.int64)
    generator.shuffle(starts)
    used = -(-(starts + case.query) // page_tokens)
    width, total = int(used.max()), int(used.sum())
    table = np.zeros((case.rows, width), np.int64)
    table[np.arange(width) < used[:, None]] = generator.permutation(total) + 1
    positions = (starts[:, None] + np.arange(case.query)).reshape(-1)
    row_of = np.repeat(np.arange(case.rows), case.query)
    slots = table[row_of, positions // page_tokens] * page_tokens + positions % page_tokens
    batch = ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        page_table=torch.from_numpy(table),
        rows=np.arange(case.rows, dtype=np.int32),
        q_start=(np.arange(case.rows + 1) * case.query).astype(np.int32),
        seq_start=starts.astype(np.int32),
        sample_at=torch.zeros(0, dtype=torch.int64),
        page_tokens=page_tokens,
        deterministic=deterministic,
    )
    return batch, torch.randn(total + 1, LAYERS, 2, KV_HEADS, page_tokens, HEAD_DIM)


def measure(case: Case, page_tokens: int, repeats: int, *, deterministic: bool) -> tuple[float, torch.Tensor]:
    """Return the best milliseconds of one layer, and its output."""
    torch.manual_seed(0)
    batch, pages = build(case, page_tokens, deterministic=deterministic)
    tokens = len(batch.token_ids)
    query = torch.randn(tokens, HEADS, HEAD_DIM)
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)
    attention = PagedAttention(batch, pages)
    out = attention.forward(1, query, key, value)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        attention.forward(1, query, key, value)
        best = min(best, time.perf_counter() - start)
    return best * 1e3, out


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    case: str
    page_tokens: int
    threads: int
    reference_ms: float
    served_ms: float
    max_difference: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Time paged attention on the CPU.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--page-tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    figures: list[Figure] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for page_tokens in options.page_tokens:
            for case in CASES:
                with torch.inference_mode():
                    reference, truth = measure(case, page_tokens, max(2, options.repeats // 5), deterministic=True)
                    served, out = measure(case, page_tokens, options.repeats, deterministic=False)
                figure = Figure(
                    case=case.name,
                    page_tokens=page_tokens,
                    threads=threads,
                    reference_ms=round(reference, 3),
                    served_ms=round(served, 3),
                    max_difference=float((out - truth).abs().max()),
                )
                figures.append(figure)
                print(
                    f"threads {threads}  page {page_tokens:3}  {case.name:40} "
                    f"reference {reference:9.3f} ms  served {served:8.3f} ms  difference {figure.max_difference:.0e}"
                )
    if options.record:
        write_record(
            "attention_cpu",
            [asdict(f) for f in figures],
            note=f"milliseconds per layer, float32; load average before the run {load:.1f}",
        )


if __name__ == "__main__":
    main()
