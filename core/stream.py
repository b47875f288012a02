"""What travels on the stream between a gateway process and a decode worker, as structs.

One `StepFrame` per engine step carries the deltas of all of this gateway's requests as parallel arrays;
rare things (finish, error, log-probabilities, need of a prefill worker) are side records.
"""

from collections.abc import Sequence

import msgspec

from core.handover import TokenLogprobs
from core.ids import Handle, Incarnation, WorkerId
from core.request import NO_FLOORS, Floors, GenerateRequest


class PrefillTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill worker that a gateway chose."""

    worker_id: WorkerId
    address: str
    incarnation: Incarnation


# --- gateway to D ------------------------------------------------------------------------------------------------


class StreamHello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame. With `resume_after` >= 0 the worker replays unacknowledged frames after that number, if it still can."""

    gateway: Incarnation
    worker: Incarnation
    """The incarnation that the gateway believes in; another one answers with an error and closes."""
    resume_after: int = -1


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One request. `prefill` None: the worker computes the prompt itself."""

    handle: Handle
    request: GenerateRequest
    prefill: PrefillTarget | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The client left or a stop string matched. Idempotent; no record answers it."""

    handle: Handle
    reason: str = ""


class Place(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to a NEED_PREFILL record: another prefill worker, or None: compute it yourself."""

    handle: Handle
    prefill: PrefillTarget | None = None


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All frames up to `sequence` arrived."""

    sequence: int


FromGateway = StreamHello | Submit | AbortRequest | Place | Ack

# --- D to gateway ------------------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt is computed: what the first attempt reports as usage. Comes with or before the first token.

    After a hand-over it comes once more, with `bytes_pulled`, when everything has landed and was validated.
    """

    handle: Handle
    num_cached_tokens: int
    prefill_worker: str = ""
    bytes_pulled: int = 0
    floors: Floors = NO_FLOORS
    """What the prompt was computed with; a resume sends them along."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Exactly one of Finished or Errored ends a handle; it follows the last token in the same or a later frame."""

    handle: Handle
    reason: str
    num_output_tokens: int
    recomputed_tokens: int = 0
    """Prompt tokens that D had to compute although P had computed them: 0 in a healthy hand-over."""


class Errored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The handle ended badly; `code` is a `core.errors` code."""

    handle: Handle
    code: str
    message: str
    retry_after_s: float = 0.0


class NeedPrefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """P was lost or refused before FINAL; the worker waits for `Place`. `failed` names the P."""

    handle: Handle
    failed: str
    code: str
    message: str


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Log-probabilities of tokens in this frame, aligned with that handle's tokens."""

    handle: Handle
    items: tuple[TokenLogprobs, ...]


Record = Started | Finished | Errored | NeedPrefill | Logprobs


class StepFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Deltas of one engine step. handles[i] got counts[i] tokens, the first at output index positions[i].

    `tokens` is the concatenation in order of handles. `sequence` counts frames of one stream from 1.
    """

    sequence: int
    handles: Sequence[int] = ()
    positions: Sequence[int] = ()
    counts: Sequence[int] = ()
    tokens: Sequence[int] = ()
    records: tuple[Record, ...] = ()
