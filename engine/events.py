"""What the engine tells its worker after each step, and the sink it tells it to. Frozen; numpy arrays are never reused.

Sequence ids are engine-local (`SeqId`), minted by `Engine`, never reused within a process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from core.errors import TandemError
from core.handover import TokenLogprobs
from core.kv import PageRef
from core.request import NO_FLOORS, FinishReason, Floors
from core.worker import KvEvent

SeqId = NewType("SeqId", int)


@dataclass(frozen=True, slots=True)
class ChunkFinal:
    """Pages of token range [start, end) of a source sequence are final (their step has retired, or they were cached)."""

    seq: SeqId
    start: int
    end: int
    pages: tuple[PageRef, ...]
    hits: tuple[int, ...] = ()
    """Replay hits that pages of this sequence were, or will be, computed behind: pages of other ones differ."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A source sequence has its whole prompt in KV and its first token; it is HELD until `release`."""

    seq: SeqId
    num_tokens: int
    first_tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    finish: FinishReason | None
    row: int
    row_generation: int
    floors: Floors = NO_FLOORS
    """What the prompt was computed with; windows of the row hold nothing below `encoder_floor`."""


@dataclass(frozen=True, slots=True)
class StartedHere:
    """A sequence that this engine prefilled itself got its first token."""

    seq: SeqId
    num_cached_tokens: int
    floors: Floors = NO_FLOORS


@dataclass(frozen=True, slots=True)
class FinishedHere:
    """A sequence ended well; its row and pages are given back (or in the tree)."""

    seq: SeqId
    reason: FinishReason
    num_output_tokens: int
    """Over all attempts."""
    recomputed_tokens: int
    """Tokens computed again here after a retraction or that a hand-over should have brought."""


@dataclass(frozen=True, slots=True)
class FailedHere:
    """A sequence ended badly; nothing of it is held any more."""

    seq: SeqId
    error: TandemError


def _no_logprobs() -> Mapping[SeqId, tuple[TokenLogprobs, ...]]:
    return {}


def _empty() -> npt.NDArray[np.int32]:
    return np.zeros(0, np.int32)


def _empty64() -> npt.NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Everything one pass of the loop produced.

    Token deltas are parallel arrays, one token per entry; the tokens that a sequence got in one step lie together, in
    order.
    """

    seqs: npt.NDArray[np.int64] = field(default_factory=_empty64)  # [n]
    positions: npt.NDArray[np.int32] = field(default_factory=_empty)  # [n] output index (0 = first output token)
    tokens: npt.NDArray[np.int32] = field(default_factory=_empty)  # [n]
    logprobs: Mapping[SeqId, tuple[TokenLogprobs, ...]] = field(default_factory=_no_logprobs)
    chunks: tuple[ChunkFinal, ...] = ()
    prefilled: tuple[Prefilled, ...] = ()
    started: tuple[StartedHere, ...] = ()
    finished: tuple[FinishedHere, ...] = ()
    failed: tuple[FailedHere, ...] = ()
    kv_events: tuple[KvEvent, ...] = ()
    kv_sequence: int = 0
    """Number of the batch that `kv_events` are (from 1, without gaps), as in `KvEventBatch`; 0 if there are none."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to tell."""
        return not (
            len(self.seqs)
            or self.chunks
            or self.prefilled
            or self.started
            or self.finished
            or self.failed
            or self.kv_events
        )


class EventSink(Protocol):
    """Receives events on the scheduler thread; must not block (it posts to another thread)."""

    def emit(self, events: StepEvents) -> None:
        """Take one non-empty batch of events."""
        ...
