"""One batch on its way through the layers: whose rows, which windows, which entries, which selections.

Becomes narrower where the decoder begins, if rows leave there. Everything that layers share is made once. Knows no
block and no streams.

Shape legend: b sequences, t tokens of the batch, s padded rows of a run of layers.
"""

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from core.errors import ConfigError
from engine.batch import ForwardBatch
from engine.models.deepseek_v41.caches import Caches
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.indexer import IndexQueries
from engine.models.deepseek_v41.layer_map import LayerPlan
from engine.models.deepseek_v41.moe import RowTokens
from engine.models.deepseek_v41.paged_attention import EntryWriter, PagedAttention
from engine.models.deepseek_v41.paged_index import PagedIndex, Selection
from engine.models.deepseek_v41.replay import COMPACT, MASK, OFF
from engine.models.deepseek_v41.rope import RopeTables, Turn
from engine.models.deepseek_v41.step_rows import EntryPlan, StepRows
from engine.models.deepseek_v41.tiles import Tiles

I64 = npt.NDArray[np.int64]


class DecoderReplay(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of a prompt run through the decoder."""

    mode: str = OFF
    """off | mask (all rows, with compact's windows: the oracle) | compact"""
    keep: int = 0
    """K: the last so many known tokens."""


def check_replay(replay: DecoderReplay, config: V41Config, step_tokens: int) -> None:
    """Raise `ConfigError` if a model cannot leave rows out before its decoder, or would need more of them.

    `step_tokens` are the most tokens of a row that one step writes and a later one takes back.
    """
    if replay.mode not in (OFF, MASK, COMPACT):
        raise ConfigError(f"decoder replay mode {replay.mode!r} is none of {OFF}, {MASK}, {COMPACT}")
    if replay.mode == OFF:
        return
    first = config.decoder_start
    if first == config.num_layers:
        raise ConfigError("decoder replay needs a decoder; every layer of this model writes entries of its own")
    late = [layer.index for layer in config.layers[first:] if layer.has_engram or layer.hash_routed]
    late += [layer.index for layer in config.layers[first + 1 :] if layer.owns_kv]
    early = [layer.index for layer in config.layers[:first] if layer.is_captured]
    if late or early:
        raise ConfigError(f"decoder replay would leave out rows that layer {(late + early)[0]} needs")
    if replay.keep < config.window + step_tokens:
        raise ConfigError(
            f"decoder replay keeps {replay.keep} tokens; windows of {config.window} and {step_tokens} tokens per step "
            f"need at least {config.window + step_tokens}"
        )


class Step:
    """One batch on its way through the layers; becomes narrower where the decoder begins."""

    def __init__(
        self,
        config: V41Config,
        replay: DecoderReplay,
        batch: ForwardBatch,
        *,
        caches: Caches,
        tiles: Tiles,
        rope: RopeTables,
    ) -> None:
        self._config = config
        self._batch = batch
        self.caches = caches
        self.tiles = tiles
        self._rope = rope
        floors = batch.replay
        none = np.zeros(batch.num_rows, np.int64)
        self._floor = none if floors is None else floors.encoder_floor.astype(np.int64)
        self._write_from = none if floors is None else floors.write_from.astype(np.int64)
        known = none if floors is None else floors.known_tokens.astype(np.int64)
        self._is_compact = replay.mode == COMPACT
        narrowed = (known > 0) & (replay.mode != OFF)
        self._decoder_floor = np.where(narrowed, np.maximum(self._floor, known - replay.keep), self._floor)
        self.candidates: torch.Tensor | None = None
        self.selections: dict[int, Selection] = {}
        self._entry_plans: dict[tuple[int, int], EntryPlan] = {}
        self._enter(StepRows(batch, np.diff(batch.q_start).astype(np.int64), tiles.multiple), self._floor)
        self.writer = EntryWriter(self.rows, caches, tiles, rope)

    def _enter(self, rows: StepRows, floor: I64) -> None:
        config, batch = self._config, self._batch
        self.rows = rows
        ids = batch.token_ids[rows.at]
        image = config.image_token_id
        self.tokens = RowTokens(ids, None if image is None or image not in ids else ids == image)
        self._turns: dict[str, Turn] = {}
        self._indexes: dict[int, PagedIndex] = {}
        window = rows.window(floor, config.window, self.caches.window_tokens)
        self.attention = PagedAttention(rows, window, self.caches, self.tiles)

    def enter_decoder(self) -> torch.Tensor | None:
        """Go on with the decoder's rows; return their indices among those before, or None if these are the same."""
        batch = self._batch
        lengths = np.diff(batch.q_start).astype(np.int64)
        if self._is_compact:
            end = batch.seq_start + lengths
            lengths = np.clip(end - np.maximum(batch.seq_start, self._decoder_floor), 0, lengths)
        rows = StepRows(batch, lengths, self.tiles.multiple)
        kept = rows.at if rows.num < self.rows.num else None
        if kept is None or rows.num:
            self._enter(rows, self._decoder_floor)
        return kept if kept is None or rows.num else kept[:0]

    def entry_plan(self, plan: LayerPlan) -> EntryPlan:
        """Return which entries of an owner's ratio the step completes."""
        key = (plan.m, 2 if plan.overlap else 1)
        if key not in self._entry_plans:
            capacity = self.caches.pending_slots(plan)
            self._entry_plans[key] = self.rows.entries(plan.m, plan.m * key[1], capacity, self._write_from)
        return self._entry_plans[key]

    def turn(self, plan: LayerPlan) -> Turn:
        """Return the turns of all rows for a layer."""
        if plan.rope not in self._turns:
            self._turns[plan.rope] = self._rope.at(plan.rope, self.rows.positions)
        return self._turns[plan.rope]

    def index(self, m: int) -> PagedIndex:
        """Return how entries of ratio m are selected."""
        if m not in self._indexes:
            self._indexes[m] = PagedIndex(self.rows, self._batch, m, self._config)
        return self._indexes[m]

    def select(self, plan: LayerPlan, queries: IndexQueries | None) -> Selection | None:
        """Return what a layer reads of its source; `queries` if it selects itself."""
        if not plan.m:
            return None
        if plan.index_source is None:
            return self.index(plan.m).everything()
        if queries is not None:
            restricted = self.candidates if plan.uses_candidates else None
            selection, blocks = self.index(plan.m).select(plan, queries, self.caches, restricted)
            self.selections[plan.index] = selection
            if blocks is not None:
                self.candidates = blocks
        return self.selections[plan.index_source]

    def sampled(self) -> torch.Tensor:
        """Return int64 [m]: the rows whose logits are wanted."""
        at = self.rows.at[: self.rows.num].numpy()
        wanted = self._batch.sample_at.numpy()
        found = np.searchsorted(at, wanted)
        assert np.array_equal(at[found.clip(max=len(at) - 1)], wanted), "a row that left cannot be sampled"
        return torch.from_numpy(found)

    def in_decoder_window(self) -> torch.Tensor:
        """Return int64: the rows that are at or above their decoder floor."""
        rows = self.rows
        positions = rows.positions[: rows.num].numpy()
        return torch.from_numpy(np.flatnonzero(positions >= self._decoder_floor[rows.owner]))
