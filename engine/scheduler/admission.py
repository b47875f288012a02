"""Who waits for a row and pages, and the pass that lets them in.

Applies `engine.scheduler.prefill` and `engine.scheduler.decode` to the queues: first sequences that ran before and
those with a reservation, then bookings (strictly first come, first served), then other prompts. Knows no clock: the
caller says what time it is.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from core.errors import NoCapacity, TandemError
from engine.events import SeqId
from engine.port import Booking
from engine.scheduler import decode, prefill
from engine.scheduler.holdings import Holdings
from engine.scheduler.row_table import RowFlag, RowState
from engine.scheduler.sources import Sources
from engine.scheduler.waiting import WaitingTable
from engine.sequence import SeqState, Sequence

MAX_ATTEMPTS = 8
"""Prompts tried in one pass without success before the pass ends."""
MAX_DEFERRALS = 2
"""Passes that a prompt waits for another one that is computing its next page."""

OnAdmitted = Callable[[Sequence], bool]
"""Told of each prompt that got its row and pages; returns False when the step has no tokens left for more."""


class Admission:
    """Queues of one engine. Scheduler thread only."""

    def __init__(self, holdings: Holdings, sources: Sources) -> None:
        config = holdings.config
        self._holdings = holdings
        self._sources = sources
        self._waiting = WaitingTable(config.max_waiting + config.num_rows)
        self._bookings: deque[tuple[Sequence, float]] = deque()
        self._booking_bypassed = 0
        self._growth = decode.growth_pages(config.horizon_tokens, config.page_tokens)
        self.tokens_done = 0
        """Query tokens of all processed steps: the unit in which waiting is measured."""

    @property
    def num_waiting(self) -> int:
        """Sequences in both queues."""
        return len(self._waiting) + len(self._bookings)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that waiting prompts have to compute."""
        return self._waiting.uncached_tokens

    def check_room(self, tokens_per_s: float) -> None:
        """Raise `NoCapacity` if the queues are full; the delay is a guess from the work before the newcomer."""
        if self.num_waiting < self._holdings.config.max_waiting:
            return
        delay = self.waiting_tokens / tokens_per_s if tokens_per_s > 0 else 1.0
        raise NoCapacity(
            f"{self.num_waiting} sequences are waiting already; try again later",
            retry_after_s=min(30.0, max(0.5, delay)),
        )

    def enqueue(self, seq: Sequence, now: float) -> None:
        """Queue a prompt (new or retracted)."""
        self._waiting.add(
            seq.id,
            arrival=seq.arrival,
            priority=seq.request.priority,
            uncached=self._holdings.uncached_tokens(seq),
            tokens_done=self.tokens_done,
            now=now,
            deadline=seq.deadline,
            retracted=seq.state is SeqState.RETRACTED,
        )

    def enqueue_booking(self, seq: Sequence, now: float) -> None:
        """Queue for a booking."""
        self._bookings.append((seq, now))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of its queue; others are ignored."""
        if seq.id in self._waiting:
            self._waiting.remove(seq.id)
        else:
            self._bookings = deque(entry for entry in self._bookings if entry[0] is not seq)

    def expired(self, now: float) -> list[Sequence]:
        """Return the waiting sequences whose deadline has passed; they stay queued until removed."""
        late = [self._holdings.sequences[seq] for seq in self._waiting.expired(now)]
        return late + [seq for seq, _ in self._bookings if seq.deadline <= now]

    # The pass.

    def run(self, now: float, on_admitted: OnAdmitted, *, has_tokens: bool) -> None:
        """Admit as many as fit. `has_tokens` False: the step has no room for a new prompt, only bookings may pass."""
        if not self.num_waiting or not self._holdings.rows.num_free:
            return
        gate = prefill.PageGate(self._margin())
        if not len(self._waiting):
            self._book(gate, now)
            return
        config, waiting = self._holdings.config, self._waiting
        candidates = waiting.candidates(self.tokens_done, now)
        due = prefill.reserved(candidates, config.max_bypass, config.max_bypass_s)
        order = prefill.admission_order(candidates, due)
        first = (candidates.retracted | due)[order]
        seqs = waiting.seqs()
        admitted = np.zeros(len(seqs), np.bool_)
        goes_on = has_tokens
        for index in order[first].tolist():
            goes_on = goes_on and self._admit(SeqId(int(seqs[index])), gate, on_admitted, admitted, index)
            if not admitted[index]:
                # A sequence that ran before is resumed before anything new; a reserved one keeps its pages.
                if candidates.retracted[index]:
                    gate.close()
                else:
                    gate.keep(self._least_need(SeqId(int(seqs[index]))))
        booked = self._book(gate, now)
        attempts = 0
        for index in order[~first].tolist():
            if not goes_on or gate.is_closed or attempts == MAX_ATTEMPTS:
                break
            goes_on = self._admit(SeqId(int(seqs[index])), gate, on_admitted, admitted, index)
            attempts += not admitted[index]
        self._booking_bypassed += bool(self._bookings) and bool(admitted.any())
        if booked or admitted.any():
            # Bookings overtake prompts too.
            overtaken = prefill.passed_over(
                np.concatenate((candidates.arrival, [seq.arrival for seq in booked])),
                np.concatenate((candidates.priority, [seq.request.priority for seq in booked])),
                np.concatenate((admitted, np.ones(len(booked), np.bool_))),
            )
            waiting.note_bypass(seqs[overtaken[: len(seqs)] & ~candidates.retracted])

    def _admit(
        self,
        seq_id: SeqId,
        gate: prefill.PageGate,
        on_admitted: OnAdmitted,
        admitted: prefill.Mask,
        index: int,
    ) -> bool:
        """Try one prompt; returns False when the step takes no more prompts."""
        holdings = self._holdings
        seq = holdings.sequences[seq_id]
        if not holdings.rows.num_free:
            gate.close()
            return False
        alone = not holdings.rows.num_used
        cached = holdings.lock_prefix(seq)
        total = -(-len(seq.tokens) // holdings.config.page_tokens)
        need = total - cached
        growth = 0 if seq.is_source else self._growth
        if self._waits_for_twin(seq, cached) or not self._fits(gate, need, growth, alone=alone):
            holdings.unlock(seq)
            return True
        if not holdings.make_room(need):
            # The pages are there but a launched step still reads them: they are free in the next pass.
            holdings.unlock(seq)
            gate.close()
            return True
        self._waiting.remove(seq.id)
        self._open(seq, cached, need)
        gate.widen(growth)
        admitted[index] = True
        return on_admitted(seq)

    def _open(self, seq: Sequence, cached: int, need: int) -> None:
        holdings = self._holdings
        cached_tokens = cached * holdings.config.page_tokens
        holdings.chains.choose(seq)
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = cached_tokens
        row = holdings.open_row(seq, SeqState.PREFILLING)
        pages = holdings.pool.allocate(need, seq.id)
        assert pages is not None
        holdings.rows.append_pages(row, pages)
        if seq.is_source:
            self._sources.announce(seq, cached_tokens)

    def _fits(self, gate: prefill.PageGate, need: int, growth: int, *, alone: bool) -> bool:
        holdings = self._holdings
        available = decode.booking_room(holdings.pool.num_free, holdings.tree.num_evictable, holdings.promised_pages)
        return gate.fits(need if alone else need + growth, available, alone=alone)

    def _waits_for_twin(self, seq: Sequence, cached: int) -> bool:
        """True if a running prefill is about to compute the very page that `seq` would start with."""
        if seq.deferrals >= MAX_DEFERRALS or not self._holdings.reuses_pages:
            return False
        wanted = self._holdings.chains.continuations(seq, cached)
        if not wanted:
            return False
        rows = self._holdings.rows
        computing = rows.in_state(RowState.PREFILLING, RowState.RUNNING)
        for row in computing[rows.committed[computing] < rows.goal[computing]].tolist():
            other = self._holdings.sequences[SeqId(int(rows.seq[row]))]
            if rows.tree_pages[row] <= cached < len(other.hashes) and other.hashes[cached] in wanted:
                seq.deferrals += 1
                return True
        return False

    def _least_need(self, seq_id: SeqId) -> int:
        seq = self._holdings.sequences[seq_id]
        size = self._holdings.config.page_tokens
        return -(-(len(seq.tokens) - self._holdings.cached_tokens(seq)) // size)

    def _margin(self) -> int:
        """Pages that admissions leave for those who run or will run."""
        rows, config = self._holdings.rows, self._holdings.config
        active = rows.in_state(RowState.RUNNING, RowState.PREFILLING, RowState.BOOKED)
        active = active[(rows.flags[active] & RowFlag.SOURCE) == 0]
        running = rows.in_state(RowState.RUNNING)
        to_finish = decode.pages_to_finish(
            rows.scheduled[running], rows.max_len[running], rows.num_pages[running], config.page_tokens
        )
        return decode.admission_margin(len(active), self._growth, to_finish, config.finish_reserve_pages)

    # Bookings.

    def _book(self, gate: prefill.PageGate, now: float) -> list[Sequence]:
        """Let bookings in, strictly in order, until one does not fit; returns them."""
        holdings, config = self._holdings, self._holdings.config
        booked: list[Sequence] = []
        while self._bookings and not gate.is_closed:
            seq, since = self._bookings[0]
            if not holdings.rows.num_free:
                break
            alone = not holdings.rows.num_used
            cached = holdings.lock_landing_prefix(seq)
            total = -(-len(seq.tokens) // config.page_tokens)
            need = total - cached
            if not self._fits(gate, need, self._growth, alone=alone):
                holdings.unlock(seq)
                if self._is_due(since, now):
                    gate.keep(need)
                break
            self._bookings.popleft()
            self._booking_bypassed = 0
            row = holdings.open_row(seq, SeqState.BOOKED)
            seq.booked_pages = total
            holdings.promised_pages += need
            gate.widen(self._growth)
            booked.append(seq)
            self.answer(seq, Booking(seq.id, cached * config.page_tokens, row))
        return booked

    def _is_due(self, since: float, now: float) -> bool:
        """True if the head of the bookings was passed over so often or long that pages are kept for it."""
        config = self._holdings.config
        return self._booking_bypassed > 0 and (
            self._booking_bypassed >= config.max_bypass or now - since >= config.max_bypass_s
        )

    @staticmethod
    def answer(seq: Sequence, result: Booking | TandemError) -> None:
        """Tell the one who booked, once."""
        callback, seq.on_booked = seq.on_booked, None
        if callback is not None:
            callback(result)
