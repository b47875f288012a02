"""What a draft model is to the runner: it observes committed tokens and proposes the next k of each row.

A drafter keeps its context in KV components of its model (rings per row), so that it travels with a hand-over like any
other KV; it holds no state of its own beside weights. Proposals decide how fast a text comes, never which text. Knows
no scheduler, no sampler and no acceptance rule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.models.model import KVTensors, Model

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Captures:
    """What the target model's forward keeps for its drafter, for n of the t query tokens."""

    at: torch.Tensor  # int64 [n] ascending indices into t
    values: torch.Tensor  # [n, width]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows that want proposals, each once."""

    rows: I32  # [b] engine rows
    anchors: I64  # [b] the last committed token, whose KV does not exist yet
    lengths: I64  # [b] tokens in KV: the anchor's position


@dataclass(frozen=True, slots=True)
class Proposal:
    """k draft tokens per row; draft i is for position `lengths + 1 + i`."""

    tokens: I64  # [b, k]
    confidences: F32  # [b, k] in [0, 1]: how likely draft i is accepted if those before it are


ChooseDraft = Callable[[int, torch.Tensor], torch.Tensor]
"""(i, logits [b, vocab]) -> token ids int64 [b] beside them: the i-th draft of each row, chosen with the rows' own sampling."""


class Drafter(Protocol):
    """Proposes tokens. Used by the executor thread only, in inference mode."""

    num_drafts: int
    """k: tokens proposed at a time."""

    def observe(self, batch: ForwardBatch, captures: Captures, committed: I32) -> None:
        """Take the context of a step's committed tokens: of row i the first `committed[i]` (int32 [b]) query tokens.

        Later query tokens of a row were rejected: other tokens will come at their positions. Writing their context too
        is harmless where it is addressed by position and read by length.
        """
        ...

    def propose(self, wanted: DraftRows, choose: ChooseDraft) -> Proposal:
        """Return drafts for rows whose tokens up to `lengths` were observed.

        Calls `choose` for i = 0 .. k-1 in order with the logits of all rows: what it returns are the drafts. A drafter
        without logits does not call it; its drafts then count as certain choices.
        """
        ...


@runtime_checkable
class SpeculativeModel(Model, Protocol):
    """A model that comes with a drafter."""

    num_drafts: int
    """k of its drafter."""

    def drafter(self, kv: KVTensors) -> Drafter:
        """Return the drafter over the KV memory that `forward_captured` is called with."""
        ...

    def forward_captured(self, batch: ForwardBatch, kv: KVTensors) -> tuple[torch.Tensor, Captures]:
        """As `forward`, and what the drafter observes."""
        ...
