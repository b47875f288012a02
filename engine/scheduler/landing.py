"""Sequences whose prompt KV comes from elsewhere: late allocation of LANDING pages, commit, drop and proof.

A booking counted the pages; here they are allocated when bytes are about to arrive. Knows no transfer: who writes into
the pages, and when that has stopped, is told by the caller.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np

from core.errors import Aborted, TandemError, TransferFailed
from core.request import FinishReason, Floors
from engine.events import SeqId
from engine.port import LandingPages
from engine.scheduler.departures import Departures
from engine.scheduler.holdings import Holdings
from engine.sequence import SeqState, Sequence
from engine.stage import Stage

OnPages = Callable[[LandingPages | TandemError], None]
_EXPECTING = (SeqState.BOOKED, SeqState.LANDING)


@dataclass(frozen=True, slots=True)
class _Wish:
    """One call of `land` that waits for pages."""

    seq: Sequence
    start: int
    end: int
    on_pages: OnPages


class Landing:
    """Booked sequences of one engine. Scheduler thread only."""

    def __init__(self, holdings: Holdings, departures: Departures) -> None:
        self._holdings = holdings
        self._departures = departures
        self._wishes: deque[_Wish] = deque()

    @property
    def is_waiting(self) -> bool:
        """True if somebody waits for pages."""
        return bool(self._wishes)

    def land(self, seq_id: SeqId, start: int, end: int, on_pages: OnPages) -> None:
        """Queue a wish; `serve` answers it. Sequences that expect nothing (any more) are answered with an error."""
        seq = self._holdings.sequences.get(seq_id)
        if seq is None or seq.state not in _EXPECTING:
            on_pages(Aborted("the request ended before its pages arrived"))
        elif not 0 <= start < end <= len(seq.tokens):
            on_pages(TransferFailed(f"pages for tokens {start} to {end} of a prompt of {len(seq.tokens)} tokens"))
        else:
            self._wishes.append(_Wish(seq, start, end, on_pages))

    def serve(self) -> int:
        """Answer wishes in order while pages last. Returns the free pages that the first unanswered one lacks, or 0."""
        holdings = self._holdings
        while self._wishes:
            wish = self._wishes[0]
            self._shorten_prefix(wish)
            count = self._new_pages(wish)
            if count and not holdings.make_room(count):
                return count - holdings.pool.num_free
            self._wishes.popleft()
            wish.on_pages(self._allocate(wish, count))
        return 0

    def _shorten_prefix(self, wish: _Wish) -> None:
        """Where the source went on behind a shorter hit than our prefix, its pages are of another kind than ours."""
        holdings, rows, row = self._holdings, self._holdings.rows, wish.seq.row
        first = wish.start // holdings.config.page_tokens
        if holdings.chains.rule.replays and first < int(rows.tree_pages[row]) == int(rows.num_pages[row]):
            holdings.shrink_prefix(wish.seq, first)

    def _new_pages(self, wish: _Wish) -> int:
        have = int(self._holdings.rows.num_pages[wish.seq.row])
        return max(0, -(-wish.end // self._holdings.config.page_tokens) - have)

    def _allocate(self, wish: _Wish, count: int) -> LandingPages | TandemError:
        holdings, seq, size = self._holdings, wish.seq, self._holdings.config.page_tokens
        rows, row = holdings.rows, seq.row
        first = max(wish.start // size, int(rows.tree_pages[row]))
        if first > int(rows.num_pages[row]):
            return TransferFailed(
                f"pages from token {wish.start} on would leave a hole after {rows.num_pages[row]} pages"
            )
        if count:
            pages = holdings.pool.allocate_landing(count, seq.id)
            assert pages is not None
            rows.append_pages(row, pages)
            holdings.promised_pages -= count
        if seq.state is SeqState.BOOKED:
            holdings.move(seq, SeqState.LANDING)
        landed = rows.pages(row, first, -(-wish.end // size))
        return LandingPages(seq.id, max(wish.start, first * size), wish.end, tuple(landed.tolist()))

    def commit(
        self,
        seq_id: SeqId,
        first_tokens: Listing[int],
        finish: FinishReason | None,
        num_cached: int,
        *,
        floors: Floors | None = None,
    ) -> None:
        """The hand-over is valid: the sequence joins the batch, or ends if its first tokens end it already.

        Raises `Aborted` if it ended meanwhile, `TransferFailed` if pages are missing or the own prefix is not of the
        kind that the source went on behind (the sequence stays as it is).
        """
        holdings = self._holdings
        seq = holdings.sequences.get(seq_id)
        if seq is None or seq.state not in _EXPECTING:
            raise Aborted("the request ended before its hand-over")
        rows, row = holdings.rows, seq.row
        have = int(rows.num_pages[row])
        if have != seq.booked_pages:
            raise TransferFailed(f"the hand-over brought {have} of {seq.booked_pages} pages")
        if len(first_tokens) != 1:
            # Drafts do not travel, only the drafter's context: a source stops at its first token.
            raise TransferFailed(f"the hand-over brought {len(first_tokens)} first tokens, this engine takes one")
        self._take_floors(seq, floors)
        length, token = len(seq.tokens), first_tokens[0]
        holdings.pool.commit_landing(rows.pages(row, int(rows.tree_pages[row])), seq.id)
        rows.tokens[row, length] = token
        rows.known[row] = length + 1
        rows.committed[row] = length
        rows.scheduled[row] = length
        seq.computed_tokens = length
        seq.has_started = True
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = num_cached
        holdings.publish(seq, length)
        holdings.move(seq, SeqState.RUNNING)
        holdings.activate(seq, token)
        reason = finish or holdings.limits.finish_after(seq.request, length + 1, token)
        if reason is not None:
            self._departures.finish(seq, reason)

    def _take_floors(self, seq: Sequence, floors: Floors | None) -> None:
        """What the source computed behind becomes the sequence's own; our prefix must lie before it, or be the same."""
        holdings = self._holdings
        if floors is None:
            return
        if seq.floors is not None:
            if seq.floors != floors:
                raise TransferFailed("the source computed the prompt with other replay floors than asked for")
        elif floors.hits and int(holdings.rows.tree_pages[seq.row]) * holdings.config.page_tokens > floors.hits[0]:
            raise TransferFailed("the source computed behind a shorter hit than the prefix that was kept here")
        seq.floors = floors
        holdings.chains.adopt(seq, floors.hits)
        seq.stage = Stage(end=len(seq.tokens), floor=floors.encoder_floor, write_from=floors.hit_tokens)

    def drop(self, seq_id: SeqId, open_pages: Listing[int]) -> None:
        """End a booked sequence: pages that may still be written become UNPROVEN, the others are free."""
        seq = self._holdings.sequences.get(seq_id)
        if seq is None or seq.state not in (*_EXPECTING, SeqState.ABANDONED):
            return
        self._forget_wishes(seq)
        holdings, rows = self._holdings, self._holdings.rows
        row = seq.row
        own = rows.pages(row, int(rows.tree_pages[row]))
        if seq.state is not SeqState.ABANDONED:
            holdings.promised_pages -= seq.booked_pages - int(rows.num_pages[row])
        # Only transfers touch LANDING pages, so no step holds them back.
        holdings.pool.abandon_landing(own, np.asarray(open_pages, np.int32))
        rows.num_pages[row] = rows.tree_pages[row]
        holdings.close_row(seq)
        holdings.forget(seq)

    def prove(self, pages: Listing[int]) -> None:
        """Pages of an operation for which `quiesced()` was true are free."""
        self._holdings.pool.prove(np.asarray(pages, np.int32))

    def abandon(self, seq: Sequence) -> None:
        """Abort a booked sequence: nothing more is promised, and what may be written stays until `drop`."""
        self._forget_wishes(seq)
        holdings = self._holdings
        have = int(holdings.rows.num_pages[seq.row])
        holdings.promised_pages -= seq.booked_pages - have
        if seq.state is SeqState.BOOKED:
            holdings.close_row(seq)
            holdings.forget(seq)
        else:
            holdings.move(seq, SeqState.ABANDONED)

    def _forget_wishes(self, seq: Sequence) -> None:
        gone = [wish for wish in self._wishes if wish.seq is seq]
        if gone:
            self._wishes = deque(wish for wish in self._wishes if wish.seq is not seq)
        for wish in gone:
            wish.on_pages(Aborted("the request ended before its pages arrived"))
