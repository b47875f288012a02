"""What the executor of a device keeps there per row between steps, and the batches that follow from it.

Page tables, the token that each row decodes next, and recent tokens live on the device and never come back: one pinned
upload a step brings what a plan changes. Executor thread only; knows no sampler and no model.
"""

from dataclasses import dataclass

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

_BUFFERS = 3
"""Uploads whose host memory may still be read: of two steps in flight, and of the one that is made."""
_CHANGES = 1 << 14
"""Changes that a pinned upload has room for; more go by a slow way."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """How a step lies in the upload: b rows, t query tokens, m of which are asked for logits."""

    rows: int
    tokens: int
    asking: int

    def sizes(self, history: int) -> tuple[int, ...]:
        """Return the lengths of: rows, q_start, seq_start; token and row of those asked; per token its row, id, page cell,
        offset, position and place among recent tokens; the places of tokens before each row's.
        """
        asked = (self.asking, self.asking)
        return (self.rows, self.rows + 1, self.rows, *asked, *(6 * (self.tokens,)), self.rows * history)


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
        self._inputs = torch.zeros(sum(most.sizes(history_tokens)) + _CHANGES, dtype=torch.int64, device=device)
        self._uploads = [stream.pinned(len(self._inputs), torch.int64) for _ in range(_BUFFERS)]
        self._floors = np.zeros((3, rows), np.int32)
        self._has_floors = np.zeros(rows, np.bool_)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._stream.device

    def stage(self, plan: Plan, shape: StepShape, chosen: npt.NDArray[np.intp]) -> None:
        """Upload a plan's changes and its tokens, padded to `shape`; `chosen` are the rows asked for logits."""
        fields = self._fields(plan, shape, chosen)
        changes = self._changes(plan)
        upload = self._uploads[plan.step % _BUFFERS]
        host, at = upload.numpy(), 0
        for values in fields:
            host[at : at + len(values)] = values
            at += len(values)
        moved = [np.concatenate(pair) for pair in changes]
        total = at + sum(len(pair) for pair in moved)
        if total > len(self._inputs):
            parts = [torch.from_numpy(pair).to(self.device) for pair in moved]
            total = at
        else:
            parts = []
            for pair in moved:
                host[at : at + len(pair)] = pair
                parts.append(self._inputs[at : at + len(pair)])
                at += len(pair)
        self._inputs[:total].copy_(upload[:total], non_blocking=True)
        for target, part in zip((self._page_table, self.next_token, self._recent), parts, strict=True):
            if len(part):
                where, values = part.chunk(2)
                target.view(-1)[where] = values.to(target.dtype)

    def batch(self, shape: StepShape, plan: Plan | None = None) -> ForwardBatch:
        """Return the tensors of the staged step; without a plan those of any step of this shape that decodes."""
        flat = self._inputs[: sum(shape.sizes(self._history))].split(shape.sizes(self._history))
        rows, _, _, asking, _, owner, ids, cell, offset, positions, note, before = flat
        small = self._inputs[: 3 * shape.rows + 1].int()
        token_ids = torch.where(ids < 0, self.next_token[owner], ids)
        slots = torch.where(offset < 0, offset, self._page_table.view(-1)[cell] * self._size + offset)
        history = None
        if self._history:
            found = torch.where(before < 0, before, self._recent[before.clamp(min=0)])
            history = found.view(shape.rows, self._history)
            self._recent[note] = token_ids
        device_rows = DeviceRows(
            rows=small[: shape.rows],
            q_start=small[shape.rows : 2 * shape.rows + 1],
            seq_start=small[2 * shape.rows + 1 :],
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
        first = 3 * shape.rows + 1 + shape.asking
        self.next_token[self._inputs[first : first + len(tokens)]] = tokens

    def is_plain(self, plan: Plan) -> bool:
        """Return whether a step decodes one token in every row, with nothing that a recorded step does not have."""
        return bool(plan.use_next.all()) and not self._has_floors[plan.rows].any()

    def _fields(self, plan: Plan, shape: StepShape, chosen: npt.NDArray[np.intp]) -> tuple[I64, ...]:
        size, slots, width = self._size, self._slots, self._history
        starts, first = plan.q_start.astype(np.int64), plan.seq_start.astype(np.int64)
        lengths = np.diff(starts)
        owner = np.repeat(plan.rows.astype(np.int64), lengths)
        tokens = len(plan.tokens)
        positions = np.arange(tokens) - np.repeat(starts[:-1] - first, lengths)
        ids = np.where(np.repeat(plan.use_next, lengths) == 1, -1, plan.tokens).astype(np.int64)
        # Of a chunk longer than the ring of recent tokens only the end stays.
        kept = np.arange(tokens) >= np.repeat(starts[1:] - slots, lengths)
        note = np.where(kept, owner * slots + positions % slots, (self._records - 1) * slots)
        back = first[:, None] + np.arange(-width, 0)
        before = np.where(back < 0, -1, plan.rows[:, None] * slots + back % slots).reshape(-1)

        def padded(values: I64, count: int, fill: int = 0) -> I64:
            return values if len(values) == count else np.pad(values, (0, count - len(values)), constant_values=fill)

        rows, count = shape.rows, shape.tokens
        return (
            padded(plan.rows.astype(np.int64), rows),
            padded(starts, rows + 1, int(starts[-1])),
            padded(first, rows),
            padded(starts[chosen + 1] - 1, shape.asking),
            padded(plan.rows[chosen].astype(np.int64), shape.asking),
            padded(owner, count),
            padded(ids, count),
            padded(owner * self._width + positions // size, count),
            padded(positions % size, count, -1),
            padded(positions, count),
            padded(note, count, (self._records - 1) * slots),
            padded(before, rows * width, -1),
        )

    def _changes(self, plan: Plan) -> tuple[tuple[I64, I64], ...]:
        """Return (where, what) for page tables, next tokens and recent tokens."""
        deltas = plan.table_deltas.astype(np.int64)
        tables = deltas[:, 0] * self._width + deltas[:, 1], deltas[:, 2]
        # Of several changes of one cell the last holds; a device would take any.
        _, last = np.unique(tables[0][::-1], return_index=True)
        keep = len(deltas) - 1 - last
        given = [init for init in plan.extra.inits if init.next_token >= 0]
        landed = np.array([i.row for i in given], np.int64), np.array([i.next_token for i in given], np.int64)
        recent = [self._begin(init, plan) for init in plan.extra.inits]
        where = np.concatenate([np.zeros(0, np.int64), *(at for at, _ in recent)])
        what = np.concatenate([np.zeros(0, np.int64), *(ids for _, ids in recent)])
        return (tables[0][keep], tables[1][keep]), landed, (where, what)

    def _begin(self, init: RowInit, plan: Plan) -> tuple[I64, I64]:
        """Take a new row over; returns where its recent tokens go, and them."""
        floors = (init.encoder_floor, init.known_tokens, init.write_from)
        self._floors[:, init.row] = floors
        self._has_floors[init.row] = any(floors)
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
