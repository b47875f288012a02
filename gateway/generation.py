"""The border inside the gateway: HTTP and text above, workers below. Token-in, token-out, one sample at a time.

`gateway.orchestrator.Orchestrator` implements `Generator` over the cluster; `tests.fakes` ships a scripted one.
Retries, resumes and attempts are invisible here: a consumer sees each output token exactly once, in order.
"""

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from core.handover import TokenLogprobs
from core.ids import RequestId
from core.request import FinishReason, MmItem, SamplingParams, StopRules
from gateway.timeline import Timeline


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate."""

    request_id: RequestId
    """Of the client's request; samples of one request share it, and differ in `sampling.sample_index`."""
    model: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    timeout_s: float
    first_token_s: float = math.inf
    """Seconds from admission within which the first token is wanted."""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    session: str = ""
    """X-Session-Affinity, X-Session-ID or X-Correlation-ID: a routing hint."""
    images: tuple[MmItem, ...] = ()
    """With pixels, by position."""
    timeline: Timeline | None = None
    """Filled on the way if the client asked for it."""
    grammar: str = ""
    """What the answer must look like (`GenerateRequest.grammar`)."""


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Some output tokens. The last delta carries `finish`; errors are raised as `TandemError` instead.

    A msgspec struct because one is made per token.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Aligned with `token_ids` if the sampling asked for them."""
    finish: FinishReason | None = None
    num_cached_tokens: int | None = None
    """Set once, with or before the first token."""


Tap = Callable[[Delta], bool]
"""Takes a delta the moment it comes. False: the iterator is to yield at once, if only an empty delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the HTTP layer needs to know of the model served (from registrations)."""

    name: str
    max_tokens_total: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Generator(Protocol):
    """Generates samples on the cluster."""

    def models(self) -> tuple[ServedModel, ...]:
        """Return the models that some registered worker serves (empty before the first registration)."""
        ...

    def generate(self, prompt: Prompt, tap: Tap | None = None) -> AsyncIterator[Delta]:
        """Yield deltas until one with `finish`. Closing the iterator aborts the request on the workers.

        While the iterator is awaited, deltas that neither begin nor end anything may go to `tap` instead, each token
        once and in order: no task wakes up for them.

        Raises before the first delta: BadRequest, NeverFits, UnknownModel, NoCapacity, NoWorker, DeadlineExceeded;
        later: WorkerLost, DeadlineExceeded, ContextExceeded.
        """
        ...
