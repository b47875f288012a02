"""What layers must know of a step's tokens besides their streams, as tensors on the device.

Made of a batch's own tensors without waiting for the device, so that it can be captured; where rows of a prompt stay out
of the decoder, the host arrays of the batch say which. Padding tokens belong to nobody: they see and store nothing.
Knows no weights and no KV.

Shape legend: b sequences, t tokens, W window.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import DeviceRows, ForwardBatch, RowReplay
from engine.models.deepseek_v41.config import V41Config
from engine.models.deepseek_v41.device.ops import Ops
from engine.models.deepseek_v41.device.turns import Turn, Turns
from engine.models.deepseek_v41.engram_hash import NO_TOKEN
from engine.models.deepseek_v41.replay import COMPACT, OFF
from engine.models.deepseek_v41.step import DecoderReplay

I64 = npt.NDArray[np.int64]

RATIOS = (1, 2)
"""Tokens per compressed entry that a device knows."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The t tokens that a run of layers computes; all tensors have t elements, int64 unless said."""

    at: torch.Tensor | None
    """Indices into the batch's tokens; None: all of them."""
    owner: torch.Tensor
    """Sequence in the batch; 0 for padding."""
    record: torch.Tensor
    """Engine row; 0 for padding."""
    positions: torch.Tensor
    slots: torch.Tensor
    """Where the token's KV goes in pages; -1 for padding."""
    floors: torch.Tensor
    """Lowest position of its window."""
    kept: torch.Tensor
    """bool: its window row goes into the ring."""
    kinds: torch.Tensor
    """int32: 1 for a token of an image, 0 for text, -1 for padding."""
    visible: torch.Tensor
    """int32 [ratios, t]: entries that it sees, by the ratios of `RATIOS`."""

    @property
    def count(self) -> int:
        """How many."""
        return len(self.positions)


class Sequences:
    """The b sequences of a step on the device. What only steps with a chunk need is made when it is asked for."""

    def __init__(self, laid: DeviceRows, pages: torch.Tensor) -> None:
        self.laid = laid
        self.pages = pages
        """int32 [b, p]"""
        self._before: dict[int, torch.Tensor] = {}

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """Engine rows, int64 [b]."""
        return self.laid.rows.long()

    @functools.cached_property
    def start(self) -> torch.Tensor:
        """Position of the first token, int64 [b]."""
        return self.laid.seq_start.long()

    @functools.cached_property
    def end(self) -> torch.Tensor:
        """Position behind the last token, int64 [b]."""
        return self.start + self.laid.q_start.diff()

    def before(self, slots: int) -> torch.Tensor:
        """Return int64 [b]: the place in a ring of so many of the token before each first one."""
        if slots not in self._before:
            self._before[slots] = (self.start - 1) % slots
        return self._before[slots]


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Which entries of one ratio a step completes, at most one a token, and what of its tokens stays pending."""

    page: torch.Tensor  # int64 [t]; -1: the token completes none
    at: torch.Tensor  # int64 [t] entry inside the page
    index: (
        torch.Tensor
    )  # int64 [t, m] rows that make it: the step's own, and behind them one before each sequence's first
    number: torch.Tensor  # int64 [t] 0, 1, 2 ..
    record: torch.Tensor  # int64 [t] engine row of tokens that stay pending; -1: it does not


class DeviceStep:
    """One batch on a device; `tokens` becomes narrower where the decoder begins, if rows leave there."""

    def __init__(
        self,
        config: V41Config,
        replay: DecoderReplay,
        batch: ForwardBatch,
        turns: Turns,
        device: torch.device,
        *,
        ops: Ops,
    ) -> None:
        self._config = config
        self._replay = replay
        self._batch = batch
        self._device = device
        self._turns = turns
        self._ops = ops
        self._made: dict[tuple[str, int], Turn] = {}
        self._entries: dict[int, EntryRows] = {}
        self._images: torch.Tensor | None = None
        laid = batch.device_rows or _laid(batch, device)
        self.max_tokens = laid.max_q
        """Most tokens of one sequence."""
        self.sequences = Sequences(laid, batch.page_table.to(device, torch.int32))
        self.ids = batch.token_ids.to(device)
        self._image = NO_TOKEN if config.image_token_id is None else config.image_token_id
        positions, slots, bounds = batch.positions.to(device), batch.slots.to(device), self._floors(batch, "encoder")
        owner, record, floors, kept, kinds, visible = ops.lay_tokens(
            self.ids, positions, slots, laid.rows, laid.q_start, bounds, self._image, RATIOS
        )
        self.tokens = TokenRows(None, owner, record, positions, slots, floors, kept, kinds, visible)
        self._write_from: torch.Tensor | None = None
        if batch.replay is not None:
            self._write_from = torch.from_numpy(batch.replay.write_from.astype(np.int64)).to(device)[owner]

    def _floors(self, batch: ForwardBatch, part: str) -> torch.Tensor | None:
        """Return int64 [b]: the window floors of a part of the model; None: there are none."""
        found = batch.replay
        if found is None:
            return None
        floors = found.encoder_floor.astype(np.int64) if part == "encoder" else self._decoder_floors(found)
        return torch.from_numpy(np.maximum(floors, 0)).to(self._device)

    def _decoder_floors(self, floors: RowReplay) -> I64:
        known = floors.known_tokens.astype(np.int64)
        narrowed = np.maximum(floors.encoder_floor, known - self._replay.keep)
        return np.where(known > 0, narrowed, floors.encoder_floor).astype(np.int64)

    def enter_decoder(self) -> torch.Tensor | None:
        """Go on with the decoder's rows; return int64 indices of those that stay, None if all do."""
        batch = self._batch
        if batch.replay is None or self._replay.mode == OFF:
            return None
        floors = self._floors(batch, "decoder")
        assert floors is not None
        tokens = self.tokens
        # Padding keeps the floor that it has.
        lowest = torch.maximum(floors[tokens.owner], tokens.floors)
        tokens = self.tokens = replace(tokens, floors=lowest, kept=tokens.positions >= lowest)
        if self._replay.mode != COMPACT:
            return None
        at = self._staying(batch)
        if at is None:
            return None
        kept = torch.from_numpy(at).to(self._device)
        self._made.clear()
        self._images = None
        self.tokens = TokenRows(
            at=kept,
            owner=tokens.owner[kept],
            record=tokens.record[kept],
            positions=tokens.positions[kept],
            slots=tokens.slots[kept],
            floors=tokens.floors[kept],
            kept=tokens.kept[kept],
            kinds=tokens.kinds[kept],
            visible=tokens.visible[:, kept],
        )
        return kept

    def _staying(self, batch: ForwardBatch) -> I64 | None:
        """Return the batch's tokens at or above their decoder floor; None if these are all."""
        assert batch.replay is not None
        lengths = np.diff(batch.q_start).astype(np.int64)
        skipped = np.clip(self._decoder_floors(batch.replay) - batch.seq_start, 0, lengths)
        if not skipped.any():
            return None
        inside = np.arange(int(batch.q_start[-1])) - np.repeat(batch.q_start[:-1], lengths)
        return np.flatnonzero(inside >= np.repeat(skipped, lengths))

    @property
    def has_floors(self) -> bool:
        """Whether the batch says which rows have windows; then `enter_decoder` may change them."""
        return self._write_from is not None

    def entries(self, m: int, page_tokens: int, slots: int) -> EntryRows:
        """Return the entries of m tokens each that all of the batch's tokens complete; `slots` of a pending ring."""
        if m not in self._entries:
            tokens, laid = self.tokens, self.sequences.laid
            found = self._ops.lay_entries(
                tokens.positions, tokens.slots, tokens.owner, tokens.record, laid.q_start, laid.seq_start,
                self._write_from, m, page_tokens, slots,
            )  # fmt: skip
            self._entries[m] = EntryRows(*found)
        return self._entries[m]

    def turn(self, rope: str, group: int = 1) -> Turn:
        """Return the turns of all tokens; with `group`, of the first token of the entry that each one completes."""
        key = (rope, group)
        if key not in self._made:
            self._made[key] = self._turns.at(rope, self.tokens.positions, self._ops, group - 1)
        return self._made[key]

    def visible(self, m: int) -> torch.Tensor:
        """Return int32 [t]: the entries of m tokens each that every token sees."""
        return self.tokens.visible[RATIOS.index(m)]

    @property
    def images(self) -> torch.Tensor:
        """Tokens of images, bool [t]."""
        if self._images is None:
            self._images = self.tokens.kinds == 1
        return self._images

    def ngrams(self) -> torch.Tensor:
        """Return int64 [t, n]: every token of the batch, then older ones; `NO_TOKEN` where there is none."""
        assert self._batch.history is not None
        history = self._batch.history.to(self._device)
        return self._ops.gather_ngrams(self.ids, self.tokens.owner, self.sequences.laid.q_start, history, self._image)

    def sampled(self) -> torch.Tensor:
        """Return int64 [m]: the rows, among those that are left, whose logits are wanted."""
        wanted = self._batch.sample_at.to(self._device)
        return wanted if self.tokens.at is None else torch.searchsorted(self.tokens.at, wanted)


def _laid(batch: ForwardBatch, device: torch.device) -> DeviceRows:
    """Return the host arrays of a batch on the device."""
    rows, q_start, seq_start = (
        torch.from_numpy(part).to(device) for part in (batch.rows, batch.q_start, batch.seq_start)
    )
    lengths = np.diff(batch.q_start)
    return DeviceRows(
        rows, q_start, seq_start, int(lengths.max(initial=0)), int((batch.seq_start + lengths).max(initial=0))
    )
