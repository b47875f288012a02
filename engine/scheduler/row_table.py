"""Rows as a structure of arrays: what the steady decode step reads and writes without touching an object per sequence.

Used by the scheduler thread only. A row belongs to one sequence at a time; its generation counts owners, and every
result that comes back carries (row, generation). Knows no page states, no tree and no policy.
"""

import enum
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from engine.events import SeqId

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

STOP_SLOTS = 8
NOBODY = -1


class RowState(enum.IntEnum):
    """What a row is doing; the planner selects by it."""

    FREE = 0
    FENCED = 1
    """Of nobody; a launched step may still touch its per-row memory."""
    PREFILLING = 2
    RUNNING = 3
    HELD = 4
    """Prefilled for somebody else; nothing is planned until release."""
    BOOKED = 5
    """Waits for KV from elsewhere."""


class RowFlag(enum.IntFlag):
    """Facts of a row that vector code must know."""

    SOURCE = 1
    """Prefill for somebody else: its first token is reported, not emitted."""
    LOGPROBS = 2
    MORE_STOPS = 4
    """Stop ids beyond the fixed slots are in `more_stops`."""


class RowTable:
    """All rows. Arrays are public: the planner and the processor work on them directly.

    Lengths in tokens: `committed` have KV by processed steps, `scheduled` also by launched ones (upper bound),
    `goal` is where prefill ends, `known` have an id in `tokens`, `max_len` bounds prompt + output.
    """

    def __init__(self, num_rows: int, max_pages: int, max_tokens: int) -> None:
        self.num_rows = num_rows
        self.generation = np.zeros(num_rows, np.uint32)
        self.state = np.full(num_rows, RowState.FREE, np.uint8)
        self.seq = np.full(num_rows, NOBODY, np.int64)
        self.committed = np.zeros(num_rows, np.int32)
        self.scheduled = np.zeros(num_rows, np.int32)
        self.goal = np.zeros(num_rows, np.int32)
        self.stage_end = np.zeros(num_rows, np.int32)
        """Where the stage of the prefill ends that may be planned now: `goal`, or an earlier hit."""
        self.slack = np.zeros(num_rows, np.int32)
        """With speculation: by how much `scheduled` may be too high, because drafts of a step in flight may fail."""
        self.kv_limit = np.zeros(num_rows, np.int32)
        """Tokens that KV of the row may ever hold."""
        self.known = np.zeros(num_rows, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.max_len = np.zeros(num_rows, np.int32)
        self.stops_from = np.zeros(num_rows, np.int32)
        """Position from which stop ids count (prompt + min_tokens)."""
        self.num_pages = np.zeros(num_rows, np.int32)
        self.tree_pages = np.zeros(num_rows, np.int32)
        """Leading columns of the page table that the tree owns and this row's receipt locks."""
        self.sent_pages = np.zeros(num_rows, np.int32)
        """Leading columns that the runner's mirror has."""
        self.stops = np.full((num_rows, STOP_SLOTS), -1, np.int32)
        self.more_stops: dict[int, frozenset[int]] = {}
        self.flags = np.zeros(num_rows, np.uint32)
        self.priority = np.zeros(num_rows, np.int32)
        self.deadline = np.full(num_rows, np.inf, np.float64)
        self.preempts = np.zeros(num_rows, np.uint8)
        self.page_table = np.zeros((num_rows, max_pages), np.int32)
        self.tokens = np.zeros((num_rows, max_tokens), np.int32)
        self._free = list(range(num_rows - 1, -1, -1))
        self._fenced: deque[tuple[int, int]] = deque()
        self._retired = 0

    @property
    def num_free(self) -> int:
        """Rows that `take` can hand out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows of living sequences."""
        return self.num_rows - len(self._free) - len(self._fenced)

    def take(self, seq: SeqId, state: RowState) -> int:
        """Give a free row to `seq`; every array is reset but `tokens` and `page_table`. Caller checks `num_free`."""
        if not self._free:
            raise InvariantError("no free row")
        row = self._free.pop()
        self.seq[row] = seq
        self.state[row] = state
        for counter in (self.committed, self.scheduled, self.goal, self.known, self.num_prompt, self.max_len):
            counter[row] = 0
        for counter in (self.stage_end, self.stops_from, self.num_pages, self.tree_pages, self.sent_pages):
            counter[row] = 0
        self.slack[row] = 0
        self.kv_limit[row] = 0
        self.flags[row] = 0
        self.stops[row] = -1
        self.priority[row] = 0
        self.preempts[row] = 0
        self.deadline[row] = np.inf
        return row

    def release(self, row: int, fence: int) -> None:
        """End ownership: results of older generations are dropped from now on; reuse waits for step `fence`."""
        if self.state[row] in (RowState.FREE, RowState.FENCED):
            raise InvariantError(f"row {row} is released twice")
        self.generation[row] += np.uint32(1)
        self.seq[row] = NOBODY
        self.deadline[row] = np.inf
        self.more_stops.pop(row, None)
        if fence > self._retired:
            self.state[row] = RowState.FENCED
            self._fenced.append((fence, row))
        else:
            self.state[row] = RowState.FREE
            self._free.append(row)

    def retire(self, step: int) -> None:
        """Free the rows whose fence is at most `step`."""
        self._retired = step
        while self._fenced and self._fenced[0][0] <= step:
            row = self._fenced.popleft()[1]
            self.state[row] = RowState.FREE
            self._free.append(row)

    def set_stops(self, row: int, token_ids: Sequence[int]) -> None:
        """Set the ids that end the row; more than the fixed slots go to a set beside them."""
        first = list(token_ids[:STOP_SLOTS])
        self.stops[row, : len(first)] = first
        if len(token_ids) > STOP_SLOTS:
            self.more_stops[row] = frozenset(token_ids[STOP_SLOTS:])
            self.flags[row] |= RowFlag.MORE_STOPS

    def set_tokens(self, row: int, token_ids: npt.NDArray[np.int32]) -> None:
        """Store the known ids from position 0."""
        self.tokens[row, : len(token_ids)] = token_ids
        self.known[row] = len(token_ids)

    def in_state(self, *states: RowState) -> I64:
        """Return the rows in any of the states, ascending."""
        mask = self.state == states[0]
        for state in states[1:]:
            mask |= self.state == state
        return np.flatnonzero(mask)

    def count(self, state: RowState) -> int:
        """Return how many rows are in a state."""
        return int(np.count_nonzero(self.state == state))

    def is_stop(self, rows: I32 | I64, tokens: I32, positions: I32) -> npt.NDArray[np.bool_]:
        """Return bool [n]: does `tokens[i]`, chosen for position `positions[i]`, end row `rows[i]`?"""
        ends = (self.stops[rows] == tokens[:, None]).any(axis=1)
        if self.more_stops:
            for i in np.flatnonzero(self.flags[rows] & RowFlag.MORE_STOPS):
                ends[i] |= int(tokens[i]) in self.more_stops[int(rows[i])]
        return ends & (positions >= self.stops_from[rows])

    def pages(self, row: int, start: int = 0, end: int | None = None) -> I32:
        """Return a copy of the row's page ids in columns [start, end), by default all of them."""
        return self.page_table[row, start : int(self.num_pages[row]) if end is None else end].copy()

    def append_pages(self, row: int, pages: I32) -> None:
        """Add pages after the row's last one."""
        have = int(self.num_pages[row])
        self.page_table[row, have : have + len(pages)] = pages
        self.num_pages[row] = have + len(pages)

    def audit(self) -> list[str]:
        """Check lengths, counts and the free lists; one sentence per violation."""
        found: list[str] = []
        fenced = sorted(row for _, row in self._fenced)
        if sorted(self._free) != self.in_state(RowState.FREE).tolist():
            found.append("R1 the free list of rows differs from their states")
        if fenced != self.in_state(RowState.FENCED).tolist():
            found.append("R1 the fenced rows differ from their states")
        used = np.flatnonzero(self.seq != NOBODY)
        if not np.array_equal(used, np.flatnonzero(self.state > RowState.FENCED)):
            found.append("R2 a row has an owner and no living state, or the reverse")
        if len(np.unique(self.seq[used])) != len(used):
            found.append("R2 a sequence owns two rows")
        for row in used.tolist():
            if not self.tree_pages[row] <= self.num_pages[row]:
                found.append(f"R3 row {row} has more tree pages than pages")
            if not self.committed[row] <= self.scheduled[row]:
                found.append(f"R3 row {row} has committed more than was scheduled")
            pages = self.pages(row)
            if len(pages) and (int(pages.min()) < 1 or len(np.unique(pages)) != len(pages)):
                found.append(f"R4 row {row} has the SINK or a page twice in its table")
        return found
