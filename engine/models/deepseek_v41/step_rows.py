"""What a run of layers must know of a step's tokens besides their streams: whose they are, where they stand, what is old.

Built on the host once per step for all rows, and once more for those that go on through the decoder. Shapes may be
padded to whole tiles: padding rows belong to nobody, stand at position 0 and see nothing. Knows no weights and no KV.

Shape legend: b sequences of the batch, n tokens, s >= n padded tokens, W window, e entries, h old rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OldRows:
    """Rows that earlier steps left in rings, in the order sequence by sequence, position by position."""

    record: torch.Tensor  # int64 [h] engine rows
    positions: torch.Tensor  # int64 [h]


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens of the step whose rows stay in a ring: of every sequence the last ones, as many as fit."""

    tokens: torch.Tensor  # int64 [k]
    record: torch.Tensor  # int64 [k]
    positions: torch.Tensor  # int64 [k]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Which window rows every token sees."""

    old: OldRows
    index: torch.Tensor  # int64 [s, W] into old rows, then the step's own tokens, in position order
    valid: torch.Tensor  # bool [s, W]
    kept: Kept


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """Which entries of one ratio this step completes, and of which tokens they are made."""

    old: OldRows
    index: torch.Tensor  # int64 [e', span] into old rows, then the step's own tokens; e' >= e padded
    exists: torch.Tensor  # bool [e', span]; false for tokens before the sequence
    first: torch.Tensor  # int64 [e'] position of each entry's first token
    page: torch.Tensor  # int64 [e]
    at: torch.Tensor  # int64 [e] entry inside the page
    kept: Kept


class StepRows:
    """The tokens of a step that a run of layers computes: of every sequence its last `lengths[i]` ones."""

    def __init__(self, batch: ForwardBatch, lengths: I64, tile: int) -> None:
        """`tile`: pad to a multiple of so many rows."""
        self._batch = batch
        self._tile = tile
        self._lengths = lengths
        self._begin = np.concatenate(([0], np.cumsum(lengths)))  # [b+1] borders among the n tokens
        self.num = int(self._begin[-1])
        """n"""
        self.size = -(-self.num // tile) * tile
        """s"""
        self.owner = np.repeat(np.arange(len(lengths)), lengths)
        """[n] index into the batch's sequences."""
        inside = np.arange(self.num) - self._begin[self.owner]
        at = batch.q_start[1:].astype(np.int64)[self.owner] - lengths[self.owner] + inside
        self._start = batch.seq_start + np.diff(batch.q_start) - lengths  # [b] position of each first token
        self._position = self._start[self.owner] + inside
        self._record = batch.rows.astype(np.int64)
        self.at = torch.from_numpy(self._padded(at, 0))
        """[s] index into the batch's tokens."""
        self.positions = torch.from_numpy(self._padded(self._position, 0))
        """[s]"""

    @property
    def lengths(self) -> I64:
        """[b] tokens per sequence."""
        return self._lengths

    @property
    def begin(self) -> I64:
        """[b+1] borders of sequences among the n tokens."""
        return self._begin

    def visible(self, m: int) -> I64:
        """Return [n]: entries of m tokens each that every token sees."""
        return (self._position + 1) // m

    def table(self) -> torch.Tensor:
        """Return int64 [s, pages]: the page table of every token's sequence."""
        return self._batch.page_table[torch.from_numpy(self._padded(self.owner, 0))]

    def window(self, lowest: I64, window: int, capacity: int) -> WindowPlan:
        """Plan windows that end at every token and reach down to `lowest` [b] at most.

        Tokens below `lowest` see nothing and leave nothing in the ring of `capacity` rows.
        """
        lowest = np.maximum(lowest, 0)
        reach = np.minimum(self._start - lowest, window - 1)
        old, base = self._old(np.where(self._lengths > 0, np.maximum(reach, 0), 0))
        seen = self._position[:, None] + np.arange(1 - window, 1)
        valid = seen >= lowest[self.owner, None]
        index = np.where(valid, self._index(seen, base), 0)
        return WindowPlan(
            old=old,
            index=torch.from_numpy(self._padded(index, 0)),
            valid=torch.from_numpy(self._padded(valid, False)),
            kept=self._kept(capacity, lowest),
        )

    def entries(self, m: int, span: int, capacity: int, write_from: I64) -> EntryPlan:
        """Plan entries of m tokens each that are pooled from the last `span` tokens; `capacity` of their pending ring.

        Tokens below `write_from` [b] complete nothing.
        """
        done = np.flatnonzero(((self._position + 1) % m == 0) & (self._position >= write_from[self.owner]))
        old, base = self._old(np.where(self._lengths > 0, np.minimum(self._start, span - 1), 0))
        owner = self.owner[done]
        used = self._position[done][:, None] + np.arange(1 - span, 1)
        index = np.where(used >= 0, self._index(used, base, owner), 0)
        slots = self._batch.slots.numpy()[self.at.numpy()[done]]
        size = self._batch.page_tokens
        return EntryPlan(
            old=old,
            index=torch.from_numpy(self._padded(index, 0)),
            exists=torch.from_numpy(self._padded(used >= 0, True)),
            first=torch.from_numpy(self._padded(self._position[done] - (m - 1), 0)),
            page=torch.from_numpy(slots // size),
            at=torch.from_numpy(slots % size // m),
            kept=self._kept(capacity, np.zeros_like(write_from)),
        )

    def _old(self, counts: I64) -> tuple[OldRows, tuple[I64, I64]]:
        """Return the `counts` [b] rows before each sequence's first token, and [b] where each run of them begins, ends."""
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(counts)), counts)
        positions = self._start[owner] - (ends[owner] - np.arange(int(ends[-1]) if len(ends) else 0))
        old = OldRows(torch.from_numpy(self._record[owner]), torch.from_numpy(positions))
        return old, (ends - counts, ends)

    def _index(self, positions: I64, base: tuple[I64, I64], owner: I64 | None = None) -> I64:
        """Return where rows at positions [x, y] of sequences `owner` [x] lie: among old rows, or behind all of them."""
        owner = self.owner if owner is None else owner
        num_old = int(base[1][-1])
        relative = positions - self._start[owner, None]
        own = num_old + self._begin[owner, None] + relative
        return np.where(relative < 0, base[1][owner, None] + relative, own)

    def _kept(self, capacity: int, lowest: I64) -> Kept:
        end = self._start + self._lengths
        first = np.maximum(end - capacity, lowest)
        tokens = np.flatnonzero(self._position >= first[self.owner])
        return Kept(
            tokens=torch.from_numpy(tokens),
            record=torch.from_numpy(self._record[self.owner[tokens]]),
            positions=torch.from_numpy(self._position[tokens]),
        )

    def _padded(self, values: npt.NDArray[np.generic], fill: int | bool) -> npt.NDArray[np.generic]:
        """Return values [x, ...] with x rounded up to whole tiles."""
        missing = -len(values) % self._tile
        if not missing:
            return values
        return np.concatenate((values, np.full((missing, *values.shape[1:]), fill, values.dtype)))
