"""How sequences leave the batch: finished, failed, ended without a word, or retracted to come back later.

The one place where a sequence that was computing gives everything back. Full pages of what was really computed go to
the tree first; they are cached, not lost.
"""

from core.errors import TandemError
from core.request import FinishReason
from engine.scheduler.admission import Admission
from engine.scheduler.holdings import Holdings
from engine.scheduler.outbox import Outbox
from engine.sequence import SeqState, Sequence


class Departures:
    """Ends and retractions of one engine. Scheduler thread only."""

    def __init__(self, holdings: Holdings, admission: Admission, outbox: Outbox) -> None:
        self._holdings = holdings
        self._admission = admission
        self._outbox = outbox
        self.num_retractions = 0
        self.recomputed_tokens = 0
        """Of ended sequences."""

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End well; the event carries all output tokens of the request, earlier attempts included."""
        num_output = int(self._holdings.rows.known[seq.row]) - seq.num_prompt
        self._leave(seq)
        self._outbox.finished(seq, reason, num_output)

    def fail(self, seq: Sequence, error: TandemError) -> None:
        """End badly, with or without a row. A booking that still waits is answered instead of an event."""
        if seq.state is SeqState.BOOKING:
            self._admission.remove(seq)
            self._holdings.forget(seq)
            self._admission.answer(seq, error)
            return
        self.end(seq)
        self._outbox.failed(seq.id, error)

    def end(self, seq: Sequence) -> None:
        """End a sequence that computes, waits or is held; no event tells of it."""
        if seq.row < 0:
            self._admission.remove(seq)
            self._holdings.forget(seq)
        else:
            self._leave(seq)

    def retract(self, seq: Sequence, now: float) -> None:
        """Take row and pages away; the sequence waits, with its age and output, to be computed again.

        A step may be in flight with it: that result is dropped with the row's generation, and the token is chosen anew
        later, from the same state.
        """
        holdings, row = self._holdings, seq.row
        committed = int(holdings.rows.committed[row])
        seq.computed_tokens = max(seq.computed_tokens, committed)
        seq.preempts = min(255, seq.preempts + 1)
        holdings.publish(seq, committed)
        holdings.close_row(seq, keep_tokens=True)
        if not seq.has_started:
            # Nobody has seen a token yet: the next attempt may build on what this one has computed.
            seq.floors = holdings.chains.floors_of(seq.request)
        holdings.move(seq, SeqState.RETRACTED)
        self._admission.enqueue(seq, now)
        self.num_retractions += 1

    def _leave(self, seq: Sequence) -> None:
        holdings = self._holdings
        holdings.publish(seq, int(holdings.rows.committed[seq.row]))
        holdings.close_row(seq)
        holdings.forget(seq)
        self.recomputed_tokens += seq.recomputed_tokens
