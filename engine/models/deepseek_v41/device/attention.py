"""The attention sublayer on a device: projections, stores, selection and attention over packed rows, output projection.

Shape legend: t tokens, d hidden, H heads, D head dim, G output groups, k selected entries.
"""

from dataclasses import dataclass

import torch

from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.beside import Beside
from engine.models.deepseek_v41.device.memory import DeviceMemory
from engine.models.deepseek_v41.device.ops import Ops
from engine.models.deepseek_v41.device.parts import AttentionParts, bits_of
from engine.models.deepseek_v41.device.rows import DeviceStep
from engine.models.deepseek_v41.device.selection import Selections
from engine.models.deepseek_v41.device.turns import Turn
from engine.models.deepseek_v41.device.windows import Windows
from engine.models.deepseek_v41.layer_map import LayerPlan

_MULTIPROCESSORS = 132
_TILE = 64
"""Keys that attention takes at a time."""
_FIXED_SPLITS = 2


@dataclass(frozen=True, slots=True)
class Inputs:
    """The collapsed, normalised input of a sublayer, and what a quantized linear reads of it."""

    values: torch.Tensor  # bfloat16 [t, d]
    codes: torch.Tensor  # uint8 [t, d]
    scales: torch.Tensor  # uint8 [t, d / 32]

    def take(self, rows: torch.Tensor) -> "Inputs":
        """Return some rows."""
        return Inputs(self.values[rows], self.codes[rows], self.scales[rows])


@dataclass(frozen=True, slots=True)
class StepRun:
    """What all layers share while a step goes through them."""

    step: DeviceStep
    memory: DeviceMemory
    ops: Ops
    windows: Windows
    selections: Selections
    fixed: bool
    """A row's bits depend on the row alone (A14)."""


def splits_of(rows: int, keys: int, *, fixed: bool) -> int:
    """Return in how many parts the keys of a row are attended side by side: few rows alone would not fill a device.

    Two tiles of a window take no longer than a merge, unless half of the device would be idle.
    """
    tiles = max(1, keys // _TILE)
    each = max(1, rows) if tiles > 2 else 2 * max(1, rows)
    return min(tiles, _FIXED_SPLITS if fixed else max(1, _MULTIPROCESSORS // each))


class DeviceAttention:
    """One attention sublayer."""

    def __init__(self, parts: AttentionParts, plan: LayerPlan, config: V41Config, beside: Beside) -> None:
        """`beside` may make entries, keys and index queries, which selections wait for."""
        self._beside = beside
        self._parts = parts
        self._plan = plan
        self._heads = config.num_heads
        self._latent = config.q_lora_rank
        self._window = config.window
        self._eps = config.norm_eps
        self._index_heads = config.index.num_heads

    def write_entries(self, inputs: Inputs, run: StepRun) -> None:
        """Store the entries and index keys that the step completes, for an owner; reads all rows of the step."""
        pooling, step, ops = self._parts.pooling, run.step, run.ops
        if pooling is None:
            return
        m, held = self._plan.m, run.memory.owners[self._plan.index]
        ring = run.memory.pending.get(self._plan.index)
        # Made before work beside begins: others read it, too.
        rows = step.entries(m, held.each * m, 0 if ring is None else ring.shape[1])
        turn = step.turn(self._plan.rope, m)
        before = None if ring is None else (step.sequences.rows, step.sequences.before(ring.shape[1]))
        with self._beside.work(len(inputs.values)):
            fresh = ops.plain_linear(inputs.values, pooling.weight, fixed=run.fixed)
            pending = fresh[:, None]
            if ring is not None:
                # Behind the step's own rows, those of the token before each sequence's first one.
                old, positions = ring[before], step.tokens.positions
                ops.commit_ring(fresh.view(torch.uint8), rows.number, rows.record, positions, ring.view(torch.uint8))
                pending = torch.cat((fresh, old)).unflatten(1, (2, -1))
            ops.store_entries(
                pending, rows.index, pooling.norm, pooling.wk, pooling.key_norm, turn.cos, turn.sin, rows.page, rows.at,
                held.entries, held.key_codes, held.key_scales, self._eps,
            )  # fmt: skip

    def forward(self, inputs: Inputs, run: StepRun) -> torch.Tensor:
        """Return the sublayer's output bfloat16 [t, d]; stores the window rows of its tokens."""
        ops, plan = run.ops, self._plan
        turn = run.step.turn(plan.rope)
        both, asked = self._latents(inputs, ops, fixed=run.fixed)
        heads, weights = self._ask(inputs, asked, turn, run)
        queries = self._queries(asked, turn, ops, fixed=run.fixed)
        windows, ring = run.windows, run.memory.windows[plan.index]
        rows = windows.rows(ring)
        self.store(both[:, self._latent :], turn, (windows.store, windows.at(rows)), rows, ops)
        windows.commit(ring, rows)
        if heads is not None and weights is not None:
            assert plan.kv_source is not None
            self._beside.join()
            run.selections.select(plan, heads, weights, run.memory.owners[plan.kv_source])
        attended = self._attend(queries, rows, windows.record, run)
        return self.project(attended, run.ops, fixed=run.fixed)

    def projected(self, inputs: Inputs, turn: Turn, ops: Ops, *, fixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated queries bfloat16 [t, H, D] and window latents [t, D]."""
        both, asked = self._latents(inputs, ops, fixed=fixed)
        return self._queries(asked, turn, ops, fixed=fixed), both[:, self._latent :]

    def _latents(
        self, inputs: Inputs, ops: Ops, *, fixed: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return latents of queries and windows bfloat16 [t, q_lora + D], and the queries' codes and scales."""
        parts = self._parts
        both = ops.dense_linear(inputs.codes, inputs.scales, *bits_of(parts.wqkv), fixed=fixed)
        _, codes, scales = ops.rms_quantize(both[:, : self._latent], parts.q_norm, self._eps)
        return both, (codes, scales)

    def _queries(self, asked: tuple[torch.Tensor, torch.Tensor], turn: Turn, ops: Ops, *, fixed: bool) -> torch.Tensor:
        queries = ops.dense_linear(*asked, *bits_of(self._parts.wq_b), fixed=fixed).unflatten(1, (self._heads, -1))
        ops.turn_heads(queries, turn.cos, turn.sin)
        return queries

    def _ask(
        self, inputs: Inputs, asked: tuple[torch.Tensor, torch.Tensor], turn: Turn, run: StepRun
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return index queries bfloat16 [t, h, w] and their weights float32 [t, h], of a layer that selects."""
        asking, ops = self._parts.asking, run.ops
        if asking is None:
            return None, None
        with self._beside.work(len(inputs.values)):
            heads = ops.dense_linear(*asked, *bits_of(asking.queries), fixed=run.fixed)
            heads = ops.index_queries(heads.unflatten(1, (self._index_heads, -1)), turn.cos, turn.sin)
            return heads, ops.plain_linear(inputs.values, asking.weights, fixed=run.fixed)

    def store(
        self, latents: torch.Tensor, turn: Turn, places: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, ops: Ops
    ) -> None:
        """Store the window rows of latents [t, D] in `rows` at `places` (record, -1: nowhere; place in it)."""
        ops.store_window(latents, self._parts.kv_norm, turn.cos, turn.sin, *places, rows, self._eps)

    @property
    def sink(self) -> torch.Tensor:
        """float32 [H]"""
        return self._parts.sink

    def _attend(
        self, queries: torch.Tensor, rows: torch.Tensor, record: torch.Tensor, run: StepRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of what the queries find."""
        plan, tokens = self._plan, run.step.tokens
        turn = run.step.turn(plan.rope)
        if plan.index_source is None:
            selection = torch.empty(len(queries), 0, dtype=torch.int32, device=queries.device)
            entries = next(iter(run.memory.owners.values())).entries
        else:
            assert plan.kv_source is not None
            selection = run.selections.of(plan.index_source)
            entries = run.memory.owners[plan.kv_source].entries
        splits = splits_of(len(queries), self._window + selection.shape[1], fixed=run.fixed)
        return run.ops.sparse_attention(
            queries, rows, record, tokens.positions, tokens.floors, self._window, entries, run.step.sequences.pages,
            tokens.owner, selection, self._parts.sink, turn.cos, turn.sin, splits, quantized=True,
        )  # fmt: skip

    def project(self, attended: tuple[torch.Tensor, torch.Tensor], ops: Ops, *, fixed: bool) -> torch.Tensor:
        """Map codes [t, H D] and scales of attention's result, turned back, to [t, d] by two quantized linears."""
        grouped = ops.dense_linear(*attended, *bits_of(self._parts.wo_a), fixed=fixed)
        return ops.dense_linear(*ops.quantize_rows(grouped), *bits_of(self._parts.wo_b), fixed=fixed)
