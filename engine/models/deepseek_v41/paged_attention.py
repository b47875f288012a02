"""Keys and values of one step for a run of layers: packs and stores new rows, and attends over windows and entries.

New window rows are read as their packed form gives them back, before they lie in the ring, so that a chunk may be
longer than the ring. Entries are stored first and read from their pages. Knows no weights beyond the block it is given.

Shape legend: s padded rows, t rows of a tile, H heads, D head dim, W window, k selected entries, e entries.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.attention import attend
from engine.models.deepseek_v41.blocks import Block
from engine.models.deepseek_v41.caches import KEYS, MAIN, Caches, Places
from engine.models.deepseek_v41.compressor import Compressor
from engine.models.deepseek_v41.paged_index import Selection
from engine.models.deepseek_v41.rope import RopeTables
from engine.models.deepseek_v41.step_rows import EntryPlan, StepRows, WindowPlan
from engine.models.deepseek_v41.tiles import Tiles

_SHARED_BYTES = 64 << 20
"""Most bytes of unpacked entries that layers with one selection share; more are unpacked tile by tile."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the rows of one layer attend to."""

    window: torch.Tensor  # [h + s, D] old rows, then the step's own
    source: int | None  # owner of the entries; None for a layer without a global part
    selection: Selection | None


class PagedAttention:
    """Attention of one step over one set of rows; windows reach as far as `window` says."""

    def __init__(self, rows: StepRows, window: WindowPlan, caches: Caches, tiles: Tiles) -> None:
        self._rows = rows
        self._window = window
        self._caches = caches
        self._tiles = tiles
        self._shared: tuple[Context, torch.Tensor] | None = None

    def store_window(self, layer: int, fresh: torch.Tensor) -> torch.Tensor:
        """Store window rows [s, D] of a layer; return old and new ones [h + s, D] as the cache gives them back."""
        caches, plan = self._caches, self._window
        ring, row = caches.window(layer), caches.window_format
        packed = row.pack(fresh)
        every = torch.cat((ring.read(plan.old.record, plan.old.positions), packed))
        ring.write(plan.kept.record, plan.kept.positions, packed[plan.kept.tokens])
        return row.unpack(every, fresh.dtype)

    def attend(self, block: Block, context: Context, queries: torch.Tensor, tile: slice) -> torch.Tensor:
        """Return [t, H, D] for queries [t, H, D], which are those of the rows in `tile`."""
        keys, valid = context.window[self._window.index[tile]], self._window.valid[tile]
        if context.selection is None:
            return attend(queries, keys, valid, block.sink)
        keys = torch.cat((keys, self._entries(context, tile)), 1)
        valid = torch.cat((valid, context.selection.valid[tile]), 1)
        if block.plan.index_source is not None or not self._tiles.fixed:
            return attend(queries, keys, valid, block.sink)
        # How many entries all rows together see depends on the batch; how many a row sees does not.
        ends = valid.shape[1] - context.selection.valid.shape[1] + context.selection.valid[tile].sum(1)
        each = [
            attend(queries[i, None], keys[i, None, :end], valid[i, None, :end], block.sink)
            for i, end in enumerate(ends.tolist())
        ]
        return torch.cat(each)

    def _entries(self, context: Context, tile: slice) -> torch.Tensor:
        """Return the selected entries [t, k, D]; layers with the same selection share them."""
        assert context.selection is not None
        assert context.source is not None
        places = context.selection.places
        size = places.record.numel() * context.window.shape[1] * context.window.element_size()
        if size > _SHARED_BYTES:
            return self._caches.entries(context.source, Places(places.record[tile], places.at[tile]))
        shared = self._shared
        if shared is None or shared[0].selection is not context.selection or shared[0].source != context.source:
            shared = self._shared = (context, self._caches.entries(context.source, places))
        return shared[1][tile]


class EntryWriter:
    """Completes entries of owners: pools pending rows, and stores what they give."""

    def __init__(self, rows: StepRows, caches: Caches, tiles: Tiles, rope: RopeTables) -> None:
        self._rows = rows
        self._caches = caches
        self._tiles = tiles
        self._rope = rope

    def write(self, block: Block, inputs: torch.Tensor, plan: EntryPlan) -> None:
        """Store the pending rows of inputs [s, d] and the entries that they complete."""
        assert block.compressor is not None
        count = len(plan.page)
        pending = self._pending(block.compressor, block.plan.index, MAIN, inputs, plan)
        key_pending = None
        if block.key_compressor is not None:
            key_pending = self._pending(block.key_compressor, block.plan.index, KEYS, inputs, plan)
        if not count:
            return
        turn = self._rope.at(block.plan.rope, plan.first)

        def made(tile: slice) -> tuple[torch.Tensor, ...]:
            assert block.compressor is not None
            exists = plan.exists[tile]
            latents = block.compressor.pool(pending[plan.index[tile]], exists)
            keys = None
            if key_pending is not None and block.key_compressor is not None:
                keys = block.key_compressor.pool(key_pending[plan.index[tile]], exists)
            entries = block.entries(latents, keys, turn.take(tile))
            return (entries.main,) if entries.index_keys is None else (entries.main, entries.index_keys)

        main, *keys = self._tiles.run(len(plan.first), made)
        places = Places(plan.page, plan.at)
        self._caches.write_entries(block.plan.index, places, main[:count])
        if keys:
            self._caches.write_index(block.plan.index, places, keys[0][:count])

    def _pending(
        self, compressor: Compressor, layer: int, kind: str, inputs: torch.Tensor, plan: EntryPlan
    ) -> torch.Tensor:
        """Return pending rows [h + s, 2, c width], old ones first; keep the last of them for later steps."""
        positions = self._rows.positions

        def projected(tile: slice) -> tuple[torch.Tensor, ...]:
            return (compressor.project(inputs[tile], positions[tile]),)

        (fresh,) = self._tiles.run(self._rows.size, projected)
        if not compressor.pending_width:
            return fresh
        ring, shape = self._caches.pending(layer, kind), fresh.shape[1:]
        old = ring.read(plan.old.record, plan.old.positions).unflatten(1, shape)
        ring.write(plan.kept.record, plan.kept.positions, fresh[plan.kept.tokens].flatten(1))
        return torch.cat((old, fresh))
