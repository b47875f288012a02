"""Room for running rows: who takes part in a step and how wide, new pages for who needs them, and relief under pressure.

With speculation a row may write up to 1 + k tokens a step and its length is known only within bounds while a step is in
flight: pages are made for the upper bound, and where pages are short rows verify fewer drafts before anybody is
retracted. Scheduler thread only.
"""

import numpy as np
import numpy.typing as npt

from core.errors import ContextExceeded
from engine.events import SeqId
from engine.scheduler import decode
from engine.scheduler.departures import Departures
from engine.scheduler.holdings import Holdings
from engine.scheduler.row_table import RowFlag, RowState
from engine.sequence import Sequence

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

AHEAD_STEPS = 2
"""Pages are evicted for rows that run out of slots within so many steps, so that growth never waits for a fence."""
SINGLE = np.int32(1)


class Growth:
    """Growth of one engine's running rows by one token a step."""

    def __init__(self, holdings: Holdings, departures: Departures) -> None:
        self._holdings = holdings
        self._departures = departures
        self._ahead = AHEAD_STEPS

    def grow(self, now: float) -> tuple[I64, I32 | np.int32]:
        """Return the running rows that take part in the step, and their query tokens, for which all have slots."""
        holdings, rows, size = self._holdings, self._holdings.rows, self._holdings.config.page_tokens
        ready = self._ready()
        short = self._short(ready)
        if len(short):
            if bool((rows.num_pages[short] >= holdings.capacity.max_pages).any()) or not holdings.make_room(len(short)):
                ready, short = self._under_pressure(short, now)
            self._add_pages(short)
        soon = decode.needs_page_soon(rows.scheduled[ready], rows.num_pages[ready], size, self._ahead)
        if soon.any():
            holdings.make_room(int(np.count_nonzero(soon)))
        return ready, SINGLE

    def retract_one(self, now: float, *, keep: int) -> bool:
        """Retract the best victim; False if at most `keep` candidates are left."""
        rows = self._holdings.rows
        active = rows.in_state(RowState.RUNNING, RowState.PREFILLING)
        active = active[(rows.flags[active] & RowFlag.SOURCE) == 0]
        if len(active) <= keep:
            return False
        order = decode.victim_order(
            priority=rows.priority[active],
            produced=rows.known[active] - rows.num_prompt[active],
            num_pages=rows.num_pages[active],
            preempts=rows.preempts[active],
            arrival=rows.seq[active],
            max_preempts=self._holdings.config.max_preempts,
        )
        self._departures.retract(self._sequence(int(active[order[0]])), now)
        return True

    def _sequence(self, row: int) -> Sequence:
        return self._holdings.sequences[SeqId(int(self._holdings.rows.seq[row]))]

    def _ready(self) -> I64:
        rows = self._holdings.rows
        running = rows.in_state(RowState.RUNNING)
        return running[decode.can_step(rows.scheduled[running], rows.max_len[running])]

    def _short(self, ready: I64) -> I64:
        """Return the rows without a slot for their next token."""
        rows = self._holdings.rows
        return ready[decode.needs_page(rows.scheduled[ready], rows.num_pages[ready], self._holdings.config.page_tokens)]

    def _starving(self, ready: I64) -> I64:
        """Return the rows that cannot go on without a page, whatever the step in flight brings."""
        return self._short(ready)

    def _add_pages(self, index: I64) -> None:
        """Give each row one page; they are free."""
        rows = self._holdings.rows
        pages = self._holdings.pool.allocate_each(rows.seq[index])
        assert pages is not None
        rows.page_table[index, rows.num_pages[index]] = pages
        rows.num_pages[index] += 1

    def _under_pressure(self, short: I64, now: float) -> tuple[I64, I64]:
        """Pages do not suffice: end who outgrew the pool, retract, and let the youngest sit the step out.

        Returns the rows that take part, and those of them that get a page, which is free.
        """
        holdings, rows = self._holdings, self._holdings.rows
        self._end_outgrown(short)
        self._relieve(now)
        ready = self._ready()
        short = self._short(ready)
        growing = short[rows.num_pages[short] < holdings.capacity.max_pages]
        if not holdings.make_room(len(growing)):
            growing = growing[np.argsort(rows.seq[growing])][: holdings.pool.num_free]
        return ready[~np.isin(ready, short) | np.isin(ready, growing)], growing

    def _end_outgrown(self, short: I64) -> None:
        """End rows that hold every page there is and need one more; their output is kept."""
        holdings, rows = self._holdings, self._holdings.rows
        outgrown = short[rows.num_pages[short] >= holdings.capacity.max_pages]
        for row in outgrown.tolist():
            # Its last token may still be in flight; it is told first.
            if rows.committed[row] == rows.scheduled[row]:
                limit = holdings.capacity.max_pages * holdings.config.page_tokens
                error = ContextExceeded(f"the sequence outgrew the page pool of {limit} tokens; its output is kept")
                self._departures.fail(self._sequence(row), error)

    def _relieve(self, now: float) -> None:
        """Retract until the rows that need a page can get one, now or when launched steps retire."""
        holdings, rows = self._holdings, self._holdings.rows
        while True:
            short = self._starving(self._ready())
            growing = int(np.count_nonzero(rows.num_pages[short] < holdings.capacity.max_pages))
            coming = holdings.num_free_or_evictable + holdings.pool.num_fenced
            if growing <= coming or not self.retract_one(now, keep=1):
                return


class SpeculativeGrowth(Growth):
    """Growth by up to 1 + k tokens a step."""

    def __init__(self, holdings: Holdings, departures: Departures, num_drafts: int) -> None:
        super().__init__(holdings, departures)
        self._width = 1 + num_drafts
        self._ahead = AHEAD_STEPS * self._width

    def grow(self, now: float) -> tuple[I64, I32 | np.int32]:
        holdings, rows, size = self._holdings, self._holdings.rows, self._holdings.config.page_tokens
        # First everybody's next token, as without speculation; then room for drafts.
        ready, _ = super().grow(now)
        limit, scheduled = rows.kv_limit[ready], rows.scheduled[ready]
        wanted = np.minimum(self._width, limit - self._least(ready))
        final = np.minimum(scheduled + wanted, limit)
        while len(lacking := ready[final > rows.num_pages[ready] * size]):
            # Drafts are worth free and cached pages, but neither a retraction nor a wait.
            if not holdings.make_room(len(lacking)):
                self._add_pages(lacking[: holdings.pool.num_free])
                break
            self._add_pages(lacking)
        room = rows.num_pages[ready] * size
        return ready, np.where(final > room, room - scheduled, wanted).astype(np.int32)

    def _least(self, index: I64) -> I32:
        """Return lower bounds of the rows' lengths after all launched steps."""
        return self._holdings.rows.scheduled[index] - self._holdings.rows.slack[index]

    def _ready(self) -> I64:
        rows = self._holdings.rows
        running = rows.in_state(RowState.RUNNING)
        return running[decode.can_step(self._least(running), rows.max_len[running])]

    def _short(self, ready: I64) -> I64:
        # By the upper bound; a row's last slot is never passed, but one that is there already has outgrown the pool.
        rows = self._holdings.rows
        limit, scheduled = rows.kv_limit[ready], rows.scheduled[ready]
        at = np.where(self._least(ready) >= limit, scheduled, np.minimum(scheduled, limit - 1))
        return ready[decode.needs_page(at, rows.num_pages[ready], self._holdings.config.page_tokens)]

    def _starving(self, ready: I64) -> I64:
        # Who may have a slot left once the step in flight is known waits for it, and costs nobody anything.
        rows = self._holdings.rows
        short = self._short(ready)
        size = self._holdings.config.page_tokens
        return short[decode.needs_page(self._least(short), rows.num_pages[short], size)]
