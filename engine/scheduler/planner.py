"""Builds the next step: pages for who waits for bytes, growth, retraction, admission, chunks, and the plan itself.

Uses upper bounds of lengths, never tokens of a step in flight. The decode part is array arithmetic over the row table;
prompts, of which few are computed at a time, are handled one by one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.errors import ContextExceeded
from engine.events import SeqId
from engine.plan import NO_EXTRA, Plan, PlanExtra, RowInit
from engine.scheduler import decode, prefill
from engine.scheduler.admission import Admission
from engine.scheduler.departures import Departures
from engine.scheduler.holdings import Holdings
from engine.scheduler.landing import Landing
from engine.scheduler.row_table import RowFlag, RowState
from engine.sequence import SeqState, Sequence

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

AHEAD_STEPS = 2
"""Pages are evicted for rows that run out of slots within so many steps, so that growth never waits for a fence."""


@dataclass(slots=True)
class _Chunks:
    """Prompts that join the step under construction."""

    started: list[int]
    """Rows admitted in this pass, in order."""
    left: int
    """Query tokens not given to started rows or set aside for continuing ones."""
    partial: int
    """Prompts that will be unfinished after this step."""


class Planner:
    """Makes plans for one engine. Scheduler thread only."""

    def __init__(self, holdings: Holdings, admission: Admission, landing: Landing, departures: Departures) -> None:
        self._holdings = holdings
        self._admission = admission
        self._landing = landing
        self._departures = departures

    def plan(self, now: float) -> Plan | None:
        """Return the next step, or None if there is nothing to compute. Marks its rows as scheduled."""
        self._serve_landing(now)
        decode_rows = self._grow(now)
        chunk_rows, lengths = self._chunk(now, len(decode_rows))
        if not len(decode_rows) and not len(chunk_rows):
            return None
        return self._build(decode_rows, chunk_rows, lengths)

    def empty(self) -> Plan:
        """Return a step without rows."""
        return self._build(np.zeros(0, np.int64), [], np.zeros(0, np.int32))

    # Landing pages.

    def _serve_landing(self, now: float) -> None:
        """Give pages to transfers; a booking is honoured by retraction if need be."""
        lack = self._landing.serve()
        while lack > self._holdings.pool.num_fenced + self._holdings.tree.num_evictable:
            if not self._retract_one(now, keep=0):
                return
            lack = self._landing.serve()

    def _retract_one(self, now: float, *, keep: int) -> bool:
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

    # Decode.

    def _grow(self, now: float) -> I64:
        """Return the running rows that take part in the step, each with a slot for its token."""
        holdings, rows, size = self._holdings, self._holdings.rows, self._holdings.config.page_tokens
        ready = self._ready()
        short = self._short(ready)
        if len(short):
            if bool((rows.num_pages[short] >= holdings.capacity.max_pages).any()) or not holdings.make_room(len(short)):
                ready, short = self._under_pressure(short, now)
            pages = holdings.pool.allocate_each(rows.seq[short])
            assert pages is not None
            rows.page_table[short, rows.num_pages[short]] = pages
            rows.num_pages[short] += 1
        soon = decode.needs_page_soon(rows.scheduled[ready], rows.num_pages[ready], size, AHEAD_STEPS)
        if soon.any():
            holdings.make_room(int(np.count_nonzero(soon)))
        return ready

    def _ready(self) -> I64:
        rows = self._holdings.rows
        running = rows.in_state(RowState.RUNNING)
        return running[decode.can_step(rows.scheduled[running], rows.max_len[running])]

    def _short(self, ready: I64) -> I64:
        rows = self._holdings.rows
        return ready[decode.needs_page(rows.scheduled[ready], rows.num_pages[ready], self._holdings.config.page_tokens)]

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
            short = self._short(self._ready())
            growing = int(np.count_nonzero(rows.num_pages[short] < holdings.capacity.max_pages))
            coming = holdings.num_free_or_evictable + holdings.pool.num_fenced
            if growing <= coming or not self._retract_one(now, keep=1):
                return

    # Prefill.

    def _chunk(self, now: float, num_decode: int) -> tuple[list[int], I32]:
        """Admit prompts and cut the step's budget; returns rows and chunk lengths, all positive."""
        config, rows = self._holdings.config, self._holdings.rows
        budget = prefill.prefill_budget(config.chunk_tokens, num_decode, config.page_tokens)
        cap = prefill.continuing_budget(
            budget, config.continuing_share, config.page_tokens, others_wait=self._admission.num_waiting > 0
        )
        there = self._half_computed()
        held_back = self._share(there, cap)
        unfinished = int(np.count_nonzero(rows.scheduled[there] + held_back < rows.goal[there]))
        chunks = _Chunks(started=[], left=budget - int(held_back.sum()), partial=unfinished)
        self._admission.run(now, lambda seq: self._start(chunks, seq.row), has_tokens=self._takes_more(chunks))
        newcomers = np.array(chunks.started, np.int64)
        started = self._split(newcomers, budget - int(held_back.sum()))
        # What newcomers leave goes back to those who were there.
        continuing = self._share(there, budget - int(started.sum()))
        lengths = np.concatenate((continuing, started))
        chosen = np.concatenate((there, newcomers))[lengths > 0]
        return chosen.tolist(), lengths[lengths > 0]

    def _half_computed(self) -> I64:
        """Return the rows whose prompts are computed in part, oldest first."""
        rows = self._holdings.rows
        there = rows.in_state(RowState.PREFILLING)
        there = there[rows.scheduled[there] < rows.stage_end[there]]
        return there[np.argsort(rows.seq[there])]

    def _share(self, index: I64, budget: int) -> I32:
        rows, config = self._holdings.rows, self._holdings.config
        return prefill.share_budget(
            rows.scheduled[index], rows.stage_end[index], budget, config.page_tokens, config.oldest_share
        )

    def _split(self, index: I64, budget: int) -> I32:
        rows = self._holdings.rows
        size = self._holdings.config.page_tokens
        return prefill.split_budget(rows.scheduled[index], rows.stage_end[index], budget, size)

    def _start(self, chunks: _Chunks, row: int) -> bool:
        """Note an admitted prompt; returns True if another one may follow in this step."""
        rows = self._holdings.rows
        chunks.started.append(row)
        length = int(self._split(np.array([row]), chunks.left)[0])
        chunks.left -= length
        chunks.partial += int(rows.scheduled[row]) + length < int(rows.goal[row])
        return self._takes_more(chunks)

    def _takes_more(self, chunks: _Chunks) -> bool:
        config = self._holdings.config
        return chunks.left >= config.page_tokens and chunks.partial < config.max_partial_prefills

    # The message.

    def _build(self, decode_rows: I64, chunk_rows: list[int], lengths: I32) -> Plan:
        holdings, rows = self._holdings, self._holdings.rows
        num_decode = len(decode_rows)
        index = np.concatenate((decode_rows, np.array(chunk_rows, np.int64)))
        start = rows.scheduled[index]
        q_start = np.zeros(len(index) + 1, np.int32)
        q_start[1 : num_decode + 1] = 1
        q_start[num_decode + 1 :] = lengths
        np.cumsum(q_start, out=q_start)
        tokens = np.zeros(int(q_start[-1]), np.int32)
        use_next = np.zeros(len(index), np.uint8)
        use_next[:num_decode] = 1
        sample = np.ones(len(index), np.uint8)
        for i, row in enumerate(chunk_rows, num_decode):
            first, end = int(start[i]), int(start[i]) + int(lengths[i - num_decode])
            tokens[q_start[i] : q_start[i + 1]] = rows.tokens[row, first:end]
            sample[i] = end == int(rows.goal[row])
            if sample[i] and not rows.flags[row] & RowFlag.SOURCE:
                # The token it is about to choose is in the runner's buffer before the next step begins.
                holdings.move(self._sequence(row), SeqState.RUNNING)
        extra = self._inits(index)
        rows.scheduled[index] = start + np.diff(q_start)
        holdings.launched += 1
        return Plan(
            step=holdings.launched,
            rows=index.astype(np.int32),
            gens=rows.generation[index],
            q_start=q_start,
            seq_start=start,
            use_next=use_next,
            sample=sample,
            tokens=tokens,
            table_deltas=self._deltas(index),
            extra=extra,
        )

    def _deltas(self, index: I64) -> I32:
        """Return (row, column, page) for every column that the runner's mirror does not have yet."""
        rows = self._holdings.rows
        index = index[rows.sent_pages[index] < rows.num_pages[index]]
        sent = rows.sent_pages[index]
        counts = rows.num_pages[index] - sent
        total = int(counts.sum())
        deltas = np.empty((total, 3), np.int32)
        owner = np.repeat(index, counts)
        before = np.cumsum(counts) - counts
        column = np.arange(total) - np.repeat(before - sent, counts)
        deltas[:, 0] = owner
        deltas[:, 1] = column
        deltas[:, 2] = rows.page_table[owner, column]
        rows.sent_pages[index] = rows.num_pages[index]
        return deltas

    def _inits(self, index: I64) -> PlanExtra:
        fresh = self._holdings.fresh_rows
        if not fresh:
            return NO_EXTRA
        chosen = set(index.tolist())
        return PlanExtra(inits=tuple(self._init(row) for row in list(fresh) if row in chosen))

    def _init(self, row: int) -> RowInit:
        holdings, rows = self._holdings, self._holdings.rows
        seq = self._sequence(row)
        request, floors = seq.request, seq.floors
        return RowInit(
            row=row,
            generation=int(rows.generation[row]),
            sampling=request.sampling,
            token_ids=rows.tokens[row, : int(rows.known[row])].tobytes(),
            num_prompt_tokens=request.num_prompt_tokens,
            min_tokens=request.stop.min_tokens,
            masked_until_min=holdings.limits.masked_ids(request),
            next_token=holdings.fresh_rows.pop(row),
            encoder_floor=seq.stage.floor,
            known_tokens=holdings.chains.rule.known_tokens(floors.decoder_floor) if floors is not None else 0,
            write_from=seq.stage.write_from,
        )
