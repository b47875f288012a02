"""Where the state of a sequence lies: global entries in pages, window rows and pending rows in rings per engine row.

All KV is packed bytes (`packing`); only pending rows, which a later token pools into an entry, keep the compute type.
Everything is addressed by position, so that a rollback is a shorter length and nothing else. One page holds the parts
of all sources, one after the other, and one record of a ring component holds all its layers. Knows no batch.

============== ====== ======================================================================================
global         PAGED  per owner: entries [page / m, bytes]; then per owner: index codes and index scales apart
window.encoder RING   per layer before the decoder: [capacity, bytes]
window.decoder RING   per layer from the decoder on
window.draft   RING   per draft stage
pending        RING   per owner with m > 1: [slots, 2 c width] values and gate scores
============== ====== ======================================================================================
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from core.kv import Component, ComponentKind, KVLayout
from engine.models.components import ELEM_BYTES, RECORD_ALIGN_BYTES
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.layer_map import LayerPlan, check_page_tokens
from engine.models.deepseek_v41.packing import RowFormat, RowFormats, row_formats
from engine.models.model import KVTensors

GLOBAL, ENCODER, DECODER, DRAFT, PENDING = "global", "window.encoder", "window.decoder", "window.draft", "pending"
MAIN, KEYS = "main", "keys"
"""What pending rows are pooled into: entries, or V4's index keys, which have a compressor of their own."""


@dataclass(frozen=True, slots=True)
class Part:
    """A sub-array of flat records: `count` rows of `width` elements, from element `offset` on."""

    name: str
    offset: int
    count: int
    width: int

    @property
    def end(self) -> int:
        """First element behind it."""
        return self.offset + self.count * self.width

    def of(self, records: torch.Tensor) -> torch.Tensor:
        """Return the view [n, count, width] of records [n, elements]."""
        return records[:, self.offset : self.end].unflatten(1, (self.count, self.width))


class CacheMap:
    """The parts of every component of one model, for one page size."""

    def __init__(self, config: V41Config, page_tokens: int, elem: str) -> None:
        """`elem` is the type of pending rows. Raises `ConfigError` if a page would split a group of tokens."""
        check_page_tokens(config.layers, page_tokens)
        self.formats: RowFormats = row_formats(config)
        self.page_tokens = page_tokens
        self.step_tokens = 1 + (config.dspark.block_size if config.dspark else 0)
        """Most tokens of a row that one step writes and a later one takes back."""
        self.window_tokens = config.window + self.step_tokens
        """Capacity of a window ring."""
        self._elem = elem
        owners = config.kv_owners
        selected = [layer for layer in owners if layer.owns_index_keys]
        index = self.formats.index
        code_bytes = index.width // 2
        self.entries = self._pack("main", owners, self.formats.entry.row_bytes, 0)
        self.index_codes = self._pack("index", selected, code_bytes, _end(self.entries))
        self.index_scales = self._pack("scale", selected, index.row_bytes - code_bytes, _end(self.index_codes))
        layers, first = config.layers, config.decoder_start
        self.windows: dict[str, dict[int, Part]] = {
            ENCODER: self._rings(layers[:first]),
            DECODER: self._rings(layers[first:]),
            DRAFT: self._rings(config.stages if config.dspark else ()),
        }
        self.pending = self._pending(config, owners)

    def layout(self, num_pages: int, num_rows: int) -> KVLayout:
        """Return the components, one region each."""
        found: list[Component] = []

        def add(name: str, parts: Collection[Part], elem: str, tokens: int) -> None:
            kind, count = (ComponentKind.PAGED, num_pages) if name == GLOBAL else (ComponentKind.RING, num_rows)
            size = ELEM_BYTES[elem]
            record = max(part.end for part in parts) * size
            found.append(
                Component(
                    name=name,
                    kind=kind,
                    record_bytes=record,
                    num_records=count,
                    stride_bytes=-(-record // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES,
                    region=len(found),
                    layers=tuple(f"{part.name}:{part.count * part.width * size}" for part in parts),
                    elem=elem,
                    capacity_tokens=tokens,
                )
            )

        paged = [*self.entries.values(), *self.index_codes.values(), *self.index_scales.values()]
        add(GLOBAL, paged, "u8", self.page_tokens)
        for name, rings in self.windows.items():
            if rings:
                add(name, rings.values(), "u8", self.window_tokens)
        if self.pending:
            add(PENDING, self.pending.values(), self._elem, max(part.count for part in self.pending.values()))
        return KVLayout(page_tokens=self.page_tokens, components=tuple(found))

    def _pack(self, kind: str, layers: Sequence[LayerPlan], width: int, offset: int) -> dict[int, Part]:
        parts: dict[int, Part] = {}
        for layer in layers:
            part = Part(f"{kind}.{layer.index}", offset, self.page_tokens // layer.m, width)
            parts[layer.index] = part
            offset = part.end
        return parts

    def _rings(self, layers: Sequence[LayerPlan]) -> dict[int, Part]:
        width, count = self.formats.window.row_bytes, self.window_tokens
        return {
            layer.index: Part(f"window.{layer.index}", i * width * count, count, width)
            for i, layer in enumerate(layers)
        }

    def _pending(self, config: V41Config, owners: Sequence[LayerPlan]) -> dict[tuple[int, str], Part]:
        parts: dict[tuple[int, str], Part] = {}
        offset = 0
        for layer in owners:
            if layer.m == 1:
                continue
            groups = 2 if layer.overlap else 1
            # A step may begin anywhere in a group and write this many tokens that are then taken back.
            slots = layer.m * groups + self.step_tokens - 1
            kinds = [(MAIN, config.head_dim)]
            if config.index.own_compressor and layer.owns_index_keys:
                kinds.append((KEYS, config.index.head_dim))
            for kind, width in kinds:
                part = Part(f"pending.{kind}.{layer.index}", offset, slots, 2 * groups * width)
                parts[layer.index, kind] = part
                offset = part.end
        return parts


def _end(parts: dict[int, Part]) -> int:
    return max((part.end for part in parts.values()), default=0)


@dataclass(frozen=True, slots=True)
class Places:
    """n places in records: a row of ring or page parts each."""

    record: torch.Tensor  # int64 [n]
    at: torch.Tensor  # int64 [n] row inside the part


class Ring:
    """Rows of one layer by position: position p of an engine row lies at p mod capacity."""

    def __init__(self, rows: torch.Tensor) -> None:
        """`rows` [num_rows, capacity, width] is a view of KV memory."""
        self._rows = rows
        self.capacity = rows.shape[1]

    def read(self, record: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [n, width] of engine rows and positions (both int64 [n])."""
        return self._rows[record, positions % self.capacity]

    def write(self, record: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Store [n, width]; no two of a record may share a slot."""
        self._rows[record, positions % self.capacity] = rows


class Caches:
    """The KV memory of one engine, part by part; views only, cheap to make."""

    def __init__(self, layout: CacheMap, kv: KVTensors, dtype: torch.dtype) -> None:
        self._map = layout
        self.dtype = dtype
        """What packed rows are read as."""
        self._pages = kv.paged(GLOBAL)
        self._records = {name: kv.per_row(name) for name, parts in layout.windows.items() if parts}
        self._pending = kv.per_row(PENDING) if layout.pending else None

    def window(self, layer: int) -> Ring:
        """Return the window ring of a layer or draft stage."""
        for name, parts in self._map.windows.items():
            if layer in parts:
                return Ring(parts[layer].of(self._records[name]))
        raise KeyError(layer)

    def pending(self, layer: int, kind: str) -> Ring:
        """Return the pending rows of an owner, `kind` MAIN or KEYS."""
        assert self._pending is not None
        return Ring(self._map.pending[layer, kind].of(self._pending))

    def write_entries(self, layer: int, places: Places, values: torch.Tensor) -> None:
        """Pack and store the main entries [n, D] of an owner."""
        part = self._map.entries[layer].of(self._pages)
        part[places.record, places.at] = self._map.formats.entry.pack(values)

    def write_index(self, layer: int, places: Places, keys: torch.Tensor) -> None:
        """Pack and store the index keys [n, index head dim] of an owner."""
        packed = self._map.formats.index.pack(keys)
        codes, scales = self._map.index_codes[layer], self._map.index_scales[layer]
        codes.of(self._pages)[places.record, places.at] = packed[:, : codes.width]
        scales.of(self._pages)[places.record, places.at] = packed[:, codes.width :]

    def entries(self, layer: int, places: Places) -> torch.Tensor:
        """Return the main entries [..., D] of an owner at places [...]; what was never written may be anything."""
        packed = self._map.entries[layer].of(self._pages)[places.record, places.at]
        return self._map.formats.entry.unpack(packed, self.dtype)

    def index_keys(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Return the index keys [g, n, index head dim] of whole pages int64 [g, p], in entry order."""
        codes, scales = self._map.index_codes[layer], self._map.index_scales[layer]
        parts = [part.of(self._pages)[pages].flatten(1, 2) for part in (codes, scales)]
        return self._map.formats.index.unpack(torch.cat(parts, -1), self.dtype)

    @property
    def window_tokens(self) -> int:
        """Capacity of every window ring."""
        return self._map.window_tokens

    def pending_slots(self, plan: LayerPlan) -> int:
        """Capacity of the pending rings of owners like this one."""
        part = self._map.pending.get((plan.index, MAIN))
        return 1 if part is None else part.count

    @property
    def window_format(self) -> RowFormat:
        """How window rows are packed."""
        return self._map.formats.window
