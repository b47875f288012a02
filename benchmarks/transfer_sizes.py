"""What a request costs whatever its size, and which sizes the engine's own requests have: why a ratio is what it is."""

from collections.abc import Mapping, Sequence

import numpy as np

from core.kv import ComponentKind, KVLayout
from engine.models.components import token_component
from engine.models.deepseek_v41.caches import CacheMap
from engine.models.deepseek_v41.parse import parse_config
from kv_transfer.config import TransferConfig
from kv_transfer.plan import Span, plan_pages, split
from tests.fakes.deepseek_configs import v41_flash_config

PAGES = 2048
MAX_RECORDS = 1024
"""The least that any transport takes in one request."""
CHUNKS = (512, 2048, 8192)


def fixed_cost(seconds: Mapping[int, float]) -> dict[str, float]:
    """Fit seconds = fixed + bytes / speed to the medians by bytes, each weighed by its own size, and tell both."""
    sizes, times = np.array(list(seconds), float), np.array(list(seconds.values()))
    # Relative errors are what noise makes alike.
    columns = np.stack([1 / times, sizes / times], axis=1)
    (fixed, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    worst = float(np.abs((fixed + per_byte * sizes) / times - 1).max())
    return {
        "fixed_us": round(1e6 * float(fixed), 1),
        "gb_per_s": round(1e-9 / float(per_byte), 3),
        "worst_deviation": round(worst, 3),
    }


def engine_requests() -> dict[str, object]:
    """Bytes of the reads that a pull posts for one chunk, by model and chunk: pages in a random order on both sides."""
    config = TransferConfig()
    rows: dict[str, object] = {}
    for name, layout in _layouts().items():
        for chunk in CHUNKS:
            count, rng = chunk // layout.page_tokens, np.random.default_rng(chunk)
            if not count:
                continue
            have, want = (Span(0, count * layout.page_tokens, rng.permutation(PAGES)[:count].tolist()) for _ in "12")
            copies = plan_pages(layout, layout, have, want, config.max_run_bytes)
            reads = [read for each in copies for read in split(each, MAX_RECORDS, config.max_bytes_per_op)]
            sizes = [read.total_bytes for read in reads]
            records = np.concatenate([read.nbytes for read in reads])
            rows[f"{name}, chunk of {chunk} tokens"] = {
                "requests": len(reads),
                "request_bytes": [min(sizes), int(np.median(sizes)), max(sizes)],
                "record_bytes": [int(records.min()), int(np.median(records)), int(records.max())],
                "bytes_in_flight": sum(sizes),
            }
    return rows


def _layouts() -> dict[str, KVLayout]:
    return {
        "SmolLM2-135M, float32, pages of 16": _llama(30, 3, 64, "f32", 16),
        "Llama of 8 B, bfloat16, pages of 64": _llama(32, 8, 128, "bf16", 64),
        "V4.1-Flash, pages of 256": CacheMap(parse_config(v41_flash_config()), 256, "f32").layout(PAGES, 4),
    }


def _llama(layers: int, heads: int, head_dim: int, elem: str, page_tokens: int) -> KVLayout:
    names: Sequence[str] = [str(layer) for layer in range(layers)]
    full = token_component(
        "full",
        ComponentKind.PAGED,
        region=0,
        layers=tuple(names),
        heads=heads,
        head_dim=head_dim,
        elem=elem,
        capacity_tokens=page_tokens,
        num_records=PAGES,
    )
    return KVLayout(page_tokens=page_tokens, components=(full,))
