"""Window rows of one step: stored where the step's rows attend to them, and kept for later steps.

A step with few tokens per sequence writes into the rings and reads them: a ring has room for a window and one step. A
chunk of a prompt gets scratch records instead, one per sequence, which hold the window before the chunk and the chunk;
what later steps can read is copied into the ring afterwards. Knows no weights.

Shape legend: b sequences, t tokens, W window, D head dim.
"""

import torch

from engine.models.deepseek_v41.device.ops import Ops
from engine.models.deepseek_v41.device.rows import DeviceStep


class Windows:
    """Window rows of one step for one run of layers, which share all that does not depend on a ring's contents."""

    def __init__(self, step: DeviceStep, window: int, step_tokens: int, ops: Ops) -> None:
        self._ops = ops
        self._window = window
        tokens = self._tokens = step.tokens
        self._sequences = step.sequences
        self.is_chunk = step.max_tokens > step_tokens
        """Whether rows lie in scratch records."""
        self._capacity = window - 1 + step.max_tokens
        self._places: dict[int, torch.Tensor] = {}
        # Rings of all layers have room for as many rows.
        self._before: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self.record = tokens.owner if self.is_chunk else tokens.record
        """int64 [t]: the record that each token attends in."""
        self.store = torch.where(tokens.kept, self.record, -1)
        """int64 [t]: the record that its own row goes into, -1: none."""

    def rows(self, ring: torch.Tensor) -> torch.Tensor:
        """Return uint8 [n, capacity, D + D / 32] where a layer with this ring stores and attends: position p at p % capacity."""
        return self._scratch(ring) if self.is_chunk else ring

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """Return int64 [t]: the place of every token in its record."""
        capacity = rows.shape[1]
        if capacity not in self._places:
            self._places[capacity] = self._tokens.positions % capacity
        return self._places[capacity]

    def commit(self, ring: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep what later steps can read, once `rows` are stored."""
        if not self.is_chunk:
            return
        places = self.at(rows)
        if self._kept is None:
            tokens = self._tokens
            last = tokens.positions >= self._sequences.end[tokens.owner] - ring.shape[1]
            record = tokens.record.masked_fill(~(tokens.kept & last), -1)
            self._kept = tokens.owner * self._capacity + places, record
        self._ops.commit_ring(rows.flatten(0, 1), *self._kept, self._tokens.positions, ring)

    def _scratch(self, ring: torch.Tensor) -> torch.Tensor:
        """Return uint8 [b, capacity, bytes] with the W - 1 rows before each sequence's first token."""
        start = self._sequences.start
        rows = torch.zeros(len(start), self._capacity, ring.shape[2], dtype=torch.uint8, device=ring.device)
        if self._before is None:
            positions = start[:, None] + torch.arange(1 - self._window, 0, device=ring.device)
            number = torch.arange(len(start), device=ring.device)[:, None]
            old = self._sequences.rows[:, None], positions % ring.shape[1]
            self._before = old, (number, positions % self._capacity)
        old, new = self._before
        rows[new] = ring[old]
        return rows
