"""Builds the next step: pages for who waits for bytes, growth, retraction, admission, chunks, and the plan itself.

Uses upper bounds of lengths, never tokens of a step in flight. The decode part is array arithmetic over the row table;
prompts, of which few are computed at a time, are handled one by one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.events import SeqId
from engine.images import Spans, spans_of
from engine.plan import NO_EXTRA, UNLIMITED, Plan, PlanExtra, RowInit
from engine.scheduler import prefill
from engine.scheduler.admission import Admission
from engine.scheduler.draft_book import DraftBook
from engine.scheduler.growth import SINGLE, Growth
from engine.scheduler.holdings import Holdings
from engine.scheduler.landing import Landing
from engine.scheduler.row_table import RowFlag, RowState
from engine.sequence import SeqState, Sequence

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Chunks:
    """Prompts that join the step under construction."""

    started: list[int]
    """Rows admitted in this pass, in order."""
    left: int
    """Query tokens not given to started rows or set aside for continuing ones."""
    partial: int
    """Prompts that will be unfinished after this step."""
    is_first: bool
    """No half-computed prompt is there: the first started one goes on whatever its next image takes."""


class Planner:
    """Makes plans for one engine. Scheduler thread only."""

    def __init__(
        self,
        holdings: Holdings,
        admission: Admission,
        landing: Landing,
        growth: Growth,
        drafts: DraftBook | None = None,
    ) -> None:
        self._holdings = holdings
        self._admission = admission
        self._landing = landing
        self._growth = growth
        self._drafts = drafts

    def plan(self, now: float) -> Plan | None:
        """Return the next step, or None if there is nothing to compute. Marks its rows as scheduled."""
        self._serve_landing(now)
        decode_rows, widths = self._growth.grow(now)
        num_decode = len(decode_rows) if widths is SINGLE else int(widths.sum())
        chunk_rows, lengths = self._chunk(now, num_decode)
        if not len(decode_rows) and not len(chunk_rows):
            return None
        return self._build(decode_rows, widths, chunk_rows, lengths)

    def empty(self) -> Plan:
        """Return a step without rows."""
        return self._build(np.zeros(0, np.int64), SINGLE, [], np.zeros(0, np.int32))

    # Landing pages.

    def _serve_landing(self, now: float) -> None:
        """Give pages to transfers; a booking is honoured by retraction if need be."""
        lack = self._landing.serve()
        while lack > self._holdings.pool.num_fenced + self._holdings.tree.num_evictable:
            if not self._retract_one(now, keep=0):
                return
            lack = self._landing.serve()

    def _retract_one(self, now: float, *, keep: int) -> bool:
        return self._growth.retract_one(now, keep=keep)

    def _sequence(self, row: int) -> Sequence:
        return self._holdings.sequences[SeqId(int(self._holdings.rows.seq[row]))]

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
        chunks = _Chunks(started=[], left=budget - int(held_back.sum()), partial=unfinished, is_first=not len(there))
        self._admission.run(now, lambda seq: self._start(chunks, seq.row), has_tokens=self._takes_more(chunks))
        newcomers = np.array(chunks.started, np.int64)
        started = self._split(newcomers, budget - int(held_back.sum()), first_goes_on=chunks.is_first)
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
            rows.scheduled[index],
            rows.stage_end[index],
            budget,
            config.page_tokens,
            config.oldest_share,
            images=self._images(index),
        )

    def _split(self, index: I64, budget: int, *, first_goes_on: bool) -> I32:
        rows = self._holdings.rows
        return prefill.split_budget(
            rows.scheduled[index],
            rows.stage_end[index],
            budget,
            self._holdings.config.page_tokens,
            self._images(index),
            first_goes_on=first_goes_on,
        )

    def _images(self, index: I64) -> list[Spans]:
        """Return where images lie in the prompts of rows."""
        return [spans_of(self._sequence(row).request) for row in index.tolist()]

    def _start(self, chunks: _Chunks, row: int) -> bool:
        """Note an admitted prompt; returns True if another one may follow in this step."""
        rows = self._holdings.rows
        goes_on = chunks.is_first and not chunks.started
        chunks.started.append(row)
        length = int(self._split(np.array([row]), chunks.left, first_goes_on=goes_on)[0])
        chunks.left -= length
        chunks.partial += int(rows.scheduled[row]) + length < int(rows.goal[row])
        return self._takes_more(chunks)

    def _takes_more(self, chunks: _Chunks) -> bool:
        config = self._holdings.config
        return chunks.left >= config.page_tokens and chunks.partial < config.max_partial_prefills

    # The message.

    def _build(self, decode_rows: I64, widths: I32 | np.int32, chunk_rows: list[int], lengths: I32) -> Plan:
        holdings, rows = self._holdings, self._holdings.rows
        num_decode = len(decode_rows)
        index = np.concatenate((decode_rows, np.array(chunk_rows, np.int64)))
        start = rows.scheduled[index]
        q_start = np.zeros(len(index) + 1, np.int32)
        q_start[1 : num_decode + 1] = widths
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
        if self._drafts is not None:
            start[:num_decode] -= rows.slack[decode_rows]
            rows.slack[decode_rows] += widths - SINGLE
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
            draft_budget=UNLIMITED if self._drafts is None else self._drafts.budget(decode_rows, widths, len(tokens)),
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
            kv_limit=int(rows.kv_limit[row]),
            encoder_floor=seq.stage.floor,
            known_tokens=holdings.chains.rule.known_tokens(floors.decoder_floor) if floors is not None else 0,
            write_from=seq.stage.write_from,
            images=tuple(item for item in request.mm_items if item.end > rows.scheduled[row]),
            grammar=request.grammar,
        )
