"""What the executor keeps per row between steps, and the tensors of a step that follow from it.

Page-table mirror, the token that each row decodes next, recent tokens for models that look back at ids, replay floors
and images. Executor thread only; knows no sampler and no model.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch, RowReplay
from engine.config import EngineConfig
from engine.plan import Plan, RowInit
from engine.runner.row_images import RowImages
from engine.runner.token_history import TokenHistory

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

MAX_ROW_TOKENS = 16
"""Most tokens of one row that a step may write and a later one take back: 1 + drafts."""


class RowMirror:
    """Row-indexed arrays of one executor. `history_tokens` = 0: no ids are kept."""

    def __init__(
        self,
        config: EngineConfig,
        max_pages: int,
        history_tokens: int = 0,
        images: RowImages | None = None,
    ) -> None:
        self._page_tokens = config.page_tokens
        self._deterministic = config.deterministic
        self.next_token = np.zeros(config.num_rows, np.int64)
        self.page_table = np.zeros((config.num_rows, max_pages), np.int64)
        self._history = TokenHistory(config.num_rows, history_tokens, MAX_ROW_TOKENS) if history_tokens else None
        self._floors = np.zeros((3, config.num_rows), np.int32)
        self._has_floors = np.zeros(config.num_rows, np.bool_)
        self._images = images

    def set_up(self, plan: Plan) -> None:
        """Take the plan's page-table changes and new rows."""
        deltas = plan.table_deltas
        self.page_table[deltas[:, 0], deltas[:, 1]] = deltas[:, 2]
        for init in plan.extra.inits:
            self._set_row(init, plan)

    def _set_row(self, init: RowInit, plan: Plan) -> None:
        row = init.row
        if init.next_token >= 0:
            self.next_token[row] = init.next_token
        floors = (init.encoder_floor, init.known_tokens, init.write_from)
        self._floors[:, row] = floors
        self._has_floors[row] = any(floors)
        if self._images is not None:
            self._images.set_row(init)
        if self._history is not None:
            start = int(plan.seq_start[np.flatnonzero(plan.rows == row)[0]])
            self._history.reset(row, np.frombuffer(init.token_ids, np.int32), start)

    def batch(
        self, rows: I32, q_start: I32, seq_start: I32, tokens: npt.NDArray[np.int64], sample_at: I64
    ) -> ForwardBatch:
        """Return the tensors of a step over `rows`, on the host; arrays as in `ForwardBatch`, `tokens` int64 [t] are its ids."""
        size = self._page_tokens
        lengths = np.diff(q_start)
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(len(tokens), dtype=np.int64) - (q_start[:-1] - seq_start)[owner]
        used = -(-(seq_start + lengths) // size)
        widest = int(used.max())
        table = self.page_table[rows, :widest]
        # Columns past a row's own pages hold what earlier owners had there.
        table[np.arange(widest) >= used[:, None]] = 0
        slots = table[owner, positions // size] * size + positions % size
        history = None
        if self._history is not None:
            history = torch.from_numpy(self._history.before(rows, seq_start.astype(np.int64)))
            self._history.write(rows, q_start, positions, tokens)
        return ForwardBatch(
            token_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            page_table=torch.from_numpy(table),
            rows=rows,
            q_start=q_start,
            seq_start=seq_start,
            sample_at=torch.from_numpy(sample_at),
            page_tokens=size,
            deterministic=self._deterministic,
            history=history,
            replay=self._replay(rows),
            images=None if self._images is None else self._images.of_step(rows, q_start, seq_start),
        )

    def _replay(self, rows: I32) -> RowReplay | None:
        if not self._has_floors[rows].any():
            return None
        encoder_floor, known_tokens, write_from = self._floors[:, rows]
        return RowReplay(encoder_floor=encoder_floor, known_tokens=known_tokens, write_from=write_from)
