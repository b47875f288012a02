"""The KV memory of one engine as kernels see it: views of the records that `caches` lays out, byte for byte the same.

Cheap to make, once per step. Knows no batch.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.caches import GLOBAL, MAIN, PENDING, CacheMap
from engine.models.model import KVTensors


@dataclass(frozen=True, slots=True)
class EntryPages:
    """Entries and index keys of one owner, in pages."""

    entries: torch.Tensor  # uint8 [pages, e, D / 2 + D / 16]
    key_codes: torch.Tensor  # uint8 [pages, e, w / 2]
    key_scales: torch.Tensor  # uint8 [pages, e, w / 32]

    @property
    def each(self) -> int:
        """Entries per page."""
        return self.entries.shape[1]


class DeviceMemory:
    """Views by layer."""

    def __init__(self, layout: CacheMap, kv: KVTensors) -> None:
        pages = kv.paged(GLOBAL)
        self.step_tokens = layout.step_tokens
        """Most tokens of a row that one step writes and a later one takes back."""
        self.owners = {
            layer: EntryPages(part.of(pages), layout.index_codes[layer].of(pages), layout.index_scales[layer].of(pages))
            for layer, part in layout.entries.items()
        }
        self.windows: dict[int, torch.Tensor] = {}
        """uint8 [rows, capacity, D + D / 32] by layer and draft stage."""
        for name, parts in layout.windows.items():
            if parts:
                records = kv.per_row(name)
                self.windows |= {layer: part.of(records) for layer, part in parts.items()}
        self.pending: dict[int, torch.Tensor] = {}
        """float32 [rows, slots, 2 D] by owner with more than one token per entry."""
        if layout.pending:
            records = kv.per_row(PENDING)
            self.pending = {layer: part.of(records) for (layer, kind), part in layout.pending.items() if kind == MAIN}
