"""Collects what one pass of the loop produced, until the loop takes it. Scheduler thread only."""

import numpy as np
import numpy.typing as npt

from core.errors import TandemError
from core.handover import TokenLogprobs
from core.request import NO_FLOORS, FinishReason
from core.worker import KvEventBatch
from engine.events import ChunkFinal, FailedHere, FinishedHere, Prefilled, SeqId, StartedHere, StepEvents
from engine.sequence import Sequence

_NO_SEQS = np.zeros(0, np.int64)
_NO_TOKENS = np.zeros(0, np.int32)


class Outbox:
    """Events of one pass. Token deltas come at most once per pass, as arrays; the rest is rare."""

    def __init__(self) -> None:
        self._seqs: npt.NDArray[np.int64] = _NO_SEQS
        self._positions: npt.NDArray[np.int32] = _NO_TOKENS
        self._tokens: npt.NDArray[np.int32] = _NO_TOKENS
        self._logprobs: dict[SeqId, tuple[TokenLogprobs, ...]] = {}
        self._chunks: list[ChunkFinal] = []
        self._prefilled: list[Prefilled] = []
        self._started: list[StartedHere] = []
        self._finished: list[FinishedHere] = []
        self._failed: list[FailedHere] = []

    @property
    def has_chunks(self) -> bool:
        """True if a destination could start to read."""
        return bool(self._chunks)

    def tokens(
        self, seqs: npt.NDArray[np.int64], positions: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]
    ) -> None:
        """Take the token deltas of a step; the arrays must not be written again."""
        if len(self._seqs):
            seqs = np.concatenate((self._seqs, seqs))
            positions = np.concatenate((self._positions, positions))
            tokens = np.concatenate((self._tokens, tokens))
        self._seqs, self._positions, self._tokens = seqs, positions, tokens

    def logprobs(self, seq: SeqId, items: tuple[TokenLogprobs, ...]) -> None:
        """Take the log-probabilities of a sequence's token in this pass."""
        self._logprobs[seq] = (*self._logprobs.get(seq, ()), *items)

    def chunk(self, event: ChunkFinal) -> None:
        """Take an announcement of final pages."""
        self._chunks.append(event)

    def prefilled(self, event: Prefilled) -> None:
        """Take the end of a source's prefill."""
        self._prefilled.append(event)

    def started(self, seq: Sequence) -> None:
        """A sequence that was prefilled here got its first token."""
        self._started.append(StartedHere(seq.id, seq.num_cached_tokens, seq.floors or NO_FLOORS))

    def finished(self, seq: Sequence, reason: FinishReason, num_output_tokens: int) -> None:
        """A sequence ended well."""
        self._finished.append(FinishedHere(seq.id, reason, num_output_tokens, seq.recomputed_tokens))

    def failed(self, seq: SeqId, error: TandemError) -> None:
        """A sequence ended badly."""
        self._failed.append(FailedHere(seq, error))

    def take(self, kv_events: KvEventBatch | None) -> StepEvents:
        """Return everything since the last call and start anew."""
        events = StepEvents(
            seqs=self._seqs,
            positions=self._positions,
            tokens=self._tokens,
            logprobs=self._logprobs,
            chunks=tuple(self._chunks),
            prefilled=tuple(self._prefilled),
            started=tuple(self._started),
            finished=tuple(self._finished),
            failed=tuple(self._failed),
            kv_events=kv_events.events if kv_events is not None else (),
            kv_sequence=kv_events.sequence if kv_events is not None else 0,
        )
        self._seqs, self._positions, self._tokens = _NO_SEQS, _NO_TOKENS, _NO_TOKENS
        if events.logprobs:
            self._logprobs = {}
        for part in (self._chunks, self._prefilled, self._started, self._finished, self._failed):
            part.clear()
        return events
