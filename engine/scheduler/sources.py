"""Sequences prefilled for somebody else: what is announced of them, and how they are held until release.

A page is announced only when no step will write it again: after the step that wrote it was processed, or because the
tree had it. Announced pages keep their place until the sequence is released.
"""

import numpy as np

from core.handover import TokenLogprobs
from core.kv import PageRef
from core.request import NO_FLOORS
from engine.events import ChunkFinal, Prefilled
from engine.scheduler.holdings import Holdings
from engine.scheduler.outbox import Outbox
from engine.sequence import SeqState, Sequence


class Sources:
    """Announcements and holding of source sequences. Scheduler thread only."""

    def __init__(self, holdings: Holdings, outbox: Outbox) -> None:
        self._holdings = holdings
        self._outbox = outbox

    def announce(self, seq: Sequence, num_tokens: int) -> None:
        """Announce what is final of the first `num_tokens` tokens: whole pages, or everything at the prompt's end."""
        rows, size = self._holdings.rows, self._holdings.config.page_tokens
        start = seq.announced_tokens
        end = num_tokens if num_tokens == int(rows.goal[seq.row]) else num_tokens - num_tokens % size
        if end <= start:
            return
        pages = rows.pages(seq.row, start // size, -(-end // size))
        epochs = self._holdings.pool.epochs(pages)
        refs = tuple(PageRef(page, epoch) for page, epoch in zip(pages.tolist(), epochs.tolist(), strict=True))
        seq.announced.extend(refs)
        seq.announced_tokens = end
        hits = seq.floors.hits if seq.floors is not None else ()
        self._outbox.chunk(ChunkFinal(seq.id, start, end, refs, hits))

    def hold(self, seq: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """The prompt is computed and its first token chosen: row and pages stay until release."""
        rows, row = self._holdings.rows, seq.row
        self._holdings.move(seq, SeqState.HELD)
        # From here on the lease decides how long the sequence stays.
        rows.deadline[row] = np.inf
        length = int(rows.goal[row])
        self._outbox.prefilled(
            Prefilled(
                seq=seq.id,
                num_tokens=length,
                first_tokens=(token,),
                logprobs=logprobs,
                num_cached_tokens=max(0, seq.num_cached_tokens),
                finish=self._holdings.limits.finish_after(seq.request, length + 1, token),
                row=row,
                row_generation=int(rows.generation[row]),
                floors=seq.floors or NO_FLOORS,
            )
        )

    def epochs_unchanged(self, seq: Sequence) -> bool:
        """True if every announced page still has the epoch it was announced with."""
        pages = np.array([ref.page for ref in seq.announced], np.int32)
        epochs = np.array([ref.epoch for ref in seq.announced], np.uint32)
        return np.array_equal(self._holdings.pool.epochs(pages), epochs)
