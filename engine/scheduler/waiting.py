"""The queue of prompts that wait for a row and pages, as parallel arrays.

Holds what the prefill policy asks for; knows no pages, no tree and no order (`engine.scheduler.prefill` decides it).
"""

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from engine.events import SeqId
from engine.scheduler.prefill import Candidates

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class WaitingTable:
    """At most `capacity` waiting sequences; entries are unordered and move when another one leaves."""

    def __init__(self, capacity: int) -> None:
        self._seq = np.zeros(capacity, np.int64)
        self._arrival = np.zeros(capacity, np.int64)
        self._priority = np.zeros(capacity, np.int32)
        self._uncached = np.zeros(capacity, np.int64)
        self._since_tokens = np.zeros(capacity, np.int64)
        self._since_s = np.zeros(capacity, np.float64)
        self._bypassed = np.zeros(capacity, np.int32)
        self._retracted = np.zeros(capacity, np.bool_)
        self._deadline = np.zeros(capacity, np.float64)
        self._slot: dict[SeqId, int] = {}

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, seq: SeqId) -> bool:
        return seq in self._slot

    @property
    def uncached_tokens(self) -> int:
        """Tokens that the whole queue has to compute, as far as known at arrival."""
        return int(self._uncached[: len(self._slot)].sum())

    def add(
        self,
        seq: SeqId,
        *,
        arrival: int,
        priority: int,
        uncached: int,
        tokens_done: int,
        now: float,
        deadline: float,
        retracted: bool,
    ) -> None:
        """Append one; `tokens_done` is the engine's work counter, from which waiting is measured."""
        slot = len(self._slot)
        if slot == len(self._seq):
            raise InvariantError("the waiting table is full")
        self._slot[seq] = slot
        self._seq[slot] = seq
        self._arrival[slot] = arrival
        self._priority[slot] = priority
        self._uncached[slot] = uncached
        self._since_tokens[slot] = tokens_done
        self._since_s[slot] = now
        self._bypassed[slot] = 0
        self._retracted[slot] = retracted
        self._deadline[slot] = deadline

    def remove(self, seq: SeqId) -> None:
        """Take one out; the last entry takes its place."""
        slot = self._slot.pop(seq)
        last = len(self._slot)
        if slot == last:
            return
        for column in self._columns():
            column[slot] = column[last]
        self._slot[SeqId(int(self._seq[slot]))] = slot

    def _columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        return (
            self._seq,
            self._arrival,
            self._priority,
            self._uncached,
            self._since_tokens,
            self._since_s,
            self._bypassed,
            self._retracted,
            self._deadline,
        )

    def candidates(self, tokens_done: int, now: float) -> Candidates:
        """Return all entries in slot order, as the policy wants them; a snapshot."""
        n = len(self._slot)
        return Candidates(
            arrival=self._arrival[:n].copy(),
            priority=self._priority[:n].copy(),
            uncached=self._uncached[:n].copy(),
            waited_tokens=tokens_done - self._since_tokens[:n],
            waited_s=now - self._since_s[:n],
            bypassed=self._bypassed[:n].copy(),
            retracted=self._retracted[:n].copy(),
        )

    def seqs(self) -> I64:
        """Return the sequence ids in slot order; a snapshot."""
        return self._seq[: len(self._slot)].copy()

    def note_bypass(self, seqs: I64) -> None:
        """Count one more pass in which these were overtaken."""
        for seq in seqs.tolist():
            self._bypassed[self._slot[seq]] += 1

    def expired(self, now: float) -> list[SeqId]:
        """Return the sequences whose deadline has passed."""
        n = len(self._slot)
        return [SeqId(seq) for seq in self._seq[:n][self._deadline[:n] <= now].tolist()]
