"""What the executor of a device keeps there per row between steps, and the batches that follow from it.

Page tables, the token that each row decodes next, and recent tokens live on the device and never come back: one pinned
upload a step brings what a plan changes. Executor thread only; knows no sampler and no model.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import DeviceRows, ForwardBatch, ImageRows, RowReplay
from engine.config import EngineConfig
from engine.plan import Plan, RowInit
from engine.runner.device_stream import DeviceStream
from engine.runner.row_images import RowImages

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Ints = npt.NDArray[np.integer[Any]]

_BUFFERS = 3
"""Uploads whose host memory may still be read: of two steps in flight, and of the one that is made."""
_CHANGES = 1 << 14
"""Changes that a pinned upload has room for; more go by a slow way."""
_ALIGNED = 4
"""Fields begin at multiples of so many values: a kernel is compiled once for addresses divisible by 16, once for others."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """How a step lies in the upload: b rows, t query tokens, m of which are asked for logits."""

    rows: int
    tokens: int
    asking: int

    def sizes(self, history: int) -> tuple[int, ...]:
        """Return the lengths of: rows, q_start, seq_start; token and row of those asked; per token its row, id, page cell,
        offset and position; with a history its place among recent tokens, and the places of those before each row's.
        """
        asked = (self.asking, self.asking)
        looked_up = (self.tokens, self.rows * history) if history else ()
        return (self.rows, self.rows + 1, self.rows, *asked, *(5 * (self.tokens,)), *looked_up)


class DeviceMirror:
    """Row-indexed tensors of one executor. `history_tokens` = 0: no ids are kept."""

    def __init__(
        self,
        config: EngineConfig,
        max_pages: int,
        stream: DeviceStream,
        history_tokens: int = 0,
        images: RowImages | None = None,
    ) -> None:
        device, rows = stream.device, config.num_rows
        self._stream = stream
        self._size = config.page_tokens
        self._deterministic = config.deterministic
        self._width = max_pages
        self._images = images
        self._history = history_tokens
        self._slots = history_tokens + 1
        # A record more than there are rows takes what is to be written nowhere.
        self._records = rows + 1
        self.next_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._page_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self._recent = torch.full((self._records * self._slots,), -1, dtype=torch.int64, device=device)
        most = StepShape(rows, config.chunk_tokens + rows, rows)
        self._inputs = torch.zeros(
            sum(map(_room, most.sizes(history_tokens))) + _CHANGES, dtype=torch.int64, device=device
        )
        self._uploads = [stream.pinned(len(self._inputs), torch.int64) for _ in range(_BUFFERS)]
        self._floors = np.zeros((3, rows), np.int32)
        self._has_floors = np.zeros(rows, np.bool_)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._stream.device

    def stage(self, plan: Plan, shape: StepShape, chosen: npt.NDArray[np.intp]) -> None:
        """Upload a plan's changes and its tokens, padded to `shape`; `chosen` are the rows asked for logits."""
        upload = self._uploads[plan.step % _BUFFERS]
        host, at = upload.numpy(), 0
        for values in self._fields(plan, shape, chosen):
            host[at : at + len(values)] = values
            at += _room(len(values))
        changes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, pair in self._changes(plan):
            end = at + len(pair)
            if end > len(host):
                changes.append((target, torch.from_numpy(pair).to(self.device)))
                continue
            host[at:end] = pair
            changes.append((target, self._inputs[at:end]))
            at = end
        self._inputs[:at].copy_(upload[:at], non_blocking=True)
        for target, pair in changes:
            where, values = pair.chunk(2)
            target[where] = values.to(target.dtype)

    def batch(self, shape: StepShape, plan: Plan | None = None) -> ForwardBatch:
        """Return the tensors of the staged step; without a plan those of any step of this shape that decodes."""
        sizes = shape.sizes(self._history)
        rooms = [_room(size) for size in sizes]
        parts = self._inputs[: sum(rooms)].split(rooms)
        flat = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        rows, _, _, asking, _, owner, ids, cell, offset, positions = flat[:10]
        small = self._inputs[: sum(rooms[:3])].int().split(rooms[:3])
        token_ids = torch.where(ids < 0, self.next_token[owner], ids)
        slots = torch.where(offset < 0, offset, self._page_table.view(-1)[cell] * self._size + offset)
        history = None
        if self._history:
            note, before = flat[10:]
            found = torch.where(before < 0, before, self._recent[before.clamp(min=0)])
            history = found.view(shape.rows, self._history)
            self._recent[note] = token_ids
        device_rows = DeviceRows(
            rows=small[0][: shape.rows],
            q_start=small[1][: shape.rows + 1],
            seq_start=small[2][: shape.rows],
            max_q=1 if plan is None else int(np.diff(plan.q_start).max(initial=0)),
            max_length=self._width * self._size,
        )
        none = np.zeros(shape.rows, np.int32)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            page_table=self._page_table[rows],
            rows=none if plan is None else plan.rows,
            q_start=np.zeros(shape.rows + 1, np.int32) if plan is None else plan.q_start,
            seq_start=none if plan is None else plan.seq_start,
            sample_at=asking,
            page_tokens=self._size,
            deterministic=self._deterministic,
            history=history,
            replay=None if plan is None else self._replay(plan.rows),
            images=None if plan is None else self._images_of(plan),
            device_rows=device_rows,
        )

    def keep(self, shape: StepShape, tokens: torch.Tensor) -> None:
        """Let the rows asked in the staged step begin their next one with `tokens` int64 [m]."""
        first = sum(_room(size) for size in shape.sizes(self._history)[:4])
        self.next_token[self._inputs[first : first + len(tokens)]] = tokens

    def take_floors(self, plan: Plan) -> None:
        """Take the floors of a plan's new rows; comes before `is_plain` and `batch` of the plan."""
        for init in plan.extra.inits:
            floors = (init.encoder_floor, init.known_tokens, init.write_from)
            self._floors[:, init.row] = floors
            self._has_floors[init.row] = any(floors)

    def is_plain(self, plan: Plan) -> bool:
        """Return whether a step decodes one token in every row, with nothing that a recorded step does not have."""
        known = self._floors[1, plan.rows]
        # Behind the tokens that were known at admission no window reaches back to a floor.
        is_behind = (known > 0) & (plan.seq_start >= known)
        return bool(plan.use_next.all()) and not (self._has_floors[plan.rows] & ~is_behind).any()

    def _fields(self, plan: Plan, shape: StepShape, chosen: npt.NDArray[np.intp]) -> tuple[Ints, ...]:
        size, rows, count = self._size, shape.rows, shape.tokens
        starts, first, own = plan.q_start.astype(np.int64), plan.seq_start.astype(np.int64), plan.rows.astype(np.int64)
        owner, positions, decodes, lengths = own, first, plan.use_next, np.diff(starts)
        if (lengths != 1).any():
            owner = np.repeat(own, lengths)
            positions = np.arange(len(owner)) - np.repeat(starts[:-1] - first, lengths)
            decodes = np.repeat(plan.use_next, lengths)
        ids = np.where(decodes, -1, plan.tokens)
        fields = (
            _padded(own, rows),
            _padded(starts, rows + 1, int(starts[-1])),
            _padded(first, rows),
            _padded(starts[chosen + 1] - 1, shape.asking),
            _padded(own[chosen], shape.asking),
            _padded(owner, count),
            _padded(ids, count),
            _padded(owner * self._width + positions // size, count),
            _padded(positions % size, count, -1),
            _padded(positions, count),
        )
        return (*fields, *self._looked_up(plan, shape, owner, positions)) if self._history else fields

    def _looked_up(self, plan: Plan, shape: StepShape, owner: I64, positions: I64) -> tuple[Ints, Ints]:
        """Return where tokens go among the recent ones, and where those before each row's are; -1: before position 0."""
        slots, width, nowhere = self._slots, self._history, (self._records - 1) * self._slots
        # Of a chunk longer than the ring of recent tokens only the end stays.
        kept = np.arange(len(owner)) >= np.repeat(plan.q_start[1:] - slots, np.diff(plan.q_start))
        note = np.where(kept, owner * slots + positions % slots, nowhere)
        back = plan.seq_start.astype(np.int64)[:, None] + np.arange(-width, 0)
        before = np.where(back < 0, -1, plan.rows[:, None] * slots + back % slots).reshape(-1)
        return _padded(note, shape.tokens, nowhere), _padded(before, shape.rows * width, -1)

    def _changes(self, plan: Plan) -> list[tuple[torch.Tensor, I64]]:
        """Return what is to be written, as (flat tensor, where and then what)."""
        changes: list[tuple[torch.Tensor, I64]] = []
        if len(plan.table_deltas):
            deltas = plan.table_deltas.astype(np.int64)
            cells = deltas[:, 0] * self._width + deltas[:, 1]
            # Of several changes of one cell the last holds; a device would take any.
            cells, last = np.unique(cells[::-1], return_index=True)
            changes.append((self._page_table.view(-1), np.concatenate((cells, deltas[len(deltas) - 1 - last, 2]))))
        if not plan.extra.inits:
            return changes
        given = [init for init in plan.extra.inits if init.next_token >= 0]
        if given:
            landed = [init.row for init in given] + [init.next_token for init in given]
            changes.append((self.next_token, np.array(landed, np.int64)))
        recent = [self._begin(init, plan) for init in plan.extra.inits]
        if self._history:
            changes.append(
                (self._recent, np.concatenate([part for side in zip(*recent, strict=True) for part in side]))
            )
        return changes

    def _begin(self, init: RowInit, plan: Plan) -> tuple[I64, I64]:
        """Take a new row over; returns where its recent tokens go, and them."""
        if self._images is not None:
            self._images.set_row(init)
        if not self._history:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        start = int(plan.seq_start[np.flatnonzero(plan.rows == init.row)[0]])
        positions = np.arange(max(0, start - self._slots), start)
        tokens = np.frombuffer(init.token_ids, np.int32)[positions].astype(np.int64)
        return init.row * self._slots + positions % self._slots, tokens

    def _replay(self, rows: I32) -> RowReplay | None:
        if not self._has_floors[rows].any():
            return None
        encoder_floor, known_tokens, write_from = self._floors[:, rows]
        return RowReplay(encoder_floor=encoder_floor, known_tokens=known_tokens, write_from=write_from)

    def _images_of(self, plan: Plan) -> ImageRows | None:
        found = None if self._images is None else self._images.of_step(plan.rows, plan.q_start, plan.seq_start)
        return None if found is None else ImageRows(found.at.to(self.device), found.rows.to(self.device))


def _room(size: int) -> int:
    """Return what a field of so many values takes of an upload."""
    return -(-size // _ALIGNED) * _ALIGNED


def _padded(values: Ints, count: int, fill: int = 0) -> Ints:
    if len(values) == count:
        return values
    padded = np.full(count, fill, np.int64)
    padded[: len(values)] = values
    return padded
