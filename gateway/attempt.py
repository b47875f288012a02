"""What to do after which failure: the pure half of retries, placements and resumes.

A request is a chain of attempts. `Progress` is all that decisions look at; they do no I/O, read no clock (`now` is
passed in) and name no worker. Rules: errors that are the client's fault or the request's own end go to the client;
everything else is tried again, first elsewhere, with growing pauses and within bounds; what the client has received
is never computed for it twice, so after the first token a retry is a resume.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from core.errors import (
    DeadlineExceeded,
    Draining,
    InvariantError,
    NeverFits,
    NoCapacity,
    NoWorker,
    TandemError,
    WorkerLost,
)
from gateway.routing.job import Shortage

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
WAIT_SHARE = 0.1
"""Of an outage that a waiting request may sleep past its end."""


class RetryRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `retries`. Times are seconds."""

    max_failures: Count = 6
    """Failed attempts in a row."""
    max_crashes: Count = 3
    """Workers that may die under one request in a row before it is suspected to kill them."""
    steady_tokens: Count = 8
    """An attempt that brought this many tokens was sound: failures are counted from zero again."""
    max_placements: Annotated[int, Meta(ge=0)] = 3
    """Prefill workers tried for one attempt before its decode worker computes the prompt itself."""
    pause_s: Seconds = 0.05
    """Before the third attempt in a row; doubles with each further one."""
    longest_pause_s: Seconds = 2.0
    start_wait_s: Seconds = 1.0
    """How long a new request waits for a worker to appear."""
    resume_wait_s: Seconds = 30.0
    """How long a request that has sent tokens waits for one: a restarted worker loads its model in this time."""
    retry_after_s: Seconds = 2.0
    """What a client is told to wait when there is no worker."""
    budget_share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Retries of errors that live workers answered, as a share of requests, so that retries cannot storm."""
    refuse_beyond: Annotated[float, Meta(ge=0)] = 2.0
    """A new request is refused at once if its first token is predicted later than this many times the time that its
    deadline leaves. 0: never."""
    budget_burst: Annotated[float, Meta(ge=0)] = 32.0


class RetryBudget:
    """Token bucket filled by requests and emptied by retries."""

    def __init__(self, rules: RetryRules) -> None:
        self._rules = rules
        self._level = rules.budget_burst

    def request(self) -> None:
        """A new request came."""
        self._level = min(self._rules.budget_burst, self._level + self._rules.budget_share)

    def take(self) -> bool:
        """True if one more retry is allowed; it is then counted."""
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


@dataclass(slots=True)
class Progress:
    """How far a request has come. Written by its owner, read by the decisions."""

    started_at: float
    deadline: float
    attempts: int = 0
    """Attempts submitted so far."""
    failures: int = 0
    """Attempts that failed in a row."""
    placements: int = 0
    """Prefill workers lost or refused within the present attempt."""
    crashes: int = 0
    received: int = 0
    """Output tokens the client has."""
    received_before: int = 0
    """The same when the last attempt failed."""
    interrupted_at: float | None = None
    """When the present trouble began; None while an attempt runs."""


@dataclass(frozen=True, slots=True)
class Again:
    """Make another attempt after `pause_s`."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the client."""

    error: TandemError


Verdict = Again | GiveUp


def count_failure(error: TandemError, *, by_worker: bool, progress: Progress, rules: RetryRules, now: float) -> None:
    """Note in `progress` that an attempt ended with `error`; `by_worker`: a live worker said so itself."""
    if progress.received - progress.received_before >= rules.steady_tokens:
        progress.failures = progress.crashes = 0
    progress.received_before = progress.received
    progress.failures += 1
    progress.crashes += isinstance(error, InvariantError) or not by_worker
    if progress.interrupted_at is None:
        progress.interrupted_at = now


def after_failure(
    error: TandemError, *, by_worker: bool, progress: Progress, rules: RetryRules, budget: RetryBudget, now: float
) -> Verdict:
    """Decide after a failure that has been counted."""
    if now >= progress.deadline or isinstance(error, DeadlineExceeded):
        return GiveUp(deadline_error(progress))
    if not error.retryable and not isinstance(error, InvariantError):
        return GiveUp(error)
    if progress.failures >= rules.max_failures or progress.crashes >= rules.max_crashes:
        return GiveUp(_exhausted(error, progress, rules))
    # A worker that is lost or leaves makes no storm: as many retries as it had requests, once.
    is_answer = by_worker and not isinstance(error, Draining)
    if is_answer and progress.received == 0 and not budget.take():
        return GiveUp(error)
    pause = 0.0 if progress.failures < 2 else rules.pause_s * 2.0 ** (progress.failures - 2)
    return Again(min(pause, rules.longest_pause_s, max(0.0, progress.deadline - now)))


def after_shortage(shortage: Shortage, *, progress: Progress, rules: RetryRules, now: float) -> Verdict:
    """Decide when routing found no pair."""
    if now >= progress.deadline:
        return GiveUp(deadline_error(progress))
    since = progress.interrupted_at if progress.interrupted_at is not None else progress.started_at
    patience = rules.resume_wait_s if progress.received else rules.start_wait_s
    if shortage.role == "fits" and not progress.received:
        return GiveUp(NeverFits(shortage.message, param="prompt"))
    if now - since < patience:
        # The longer it lasts the rarer the questions: a thousand waiting requests must not eat the event loop.
        pause = min(max(rules.pause_s, (now - since) * WAIT_SHARE), rules.longest_pause_s)
        return Again(min(pause, max(0.0, progress.deadline - now)))
    if progress.received:
        return GiveUp(
            WorkerLost(
                f"the worker was lost and the request could not be resumed: {shortage.message}",
                retry_after_s=rules.retry_after_s,
            )
        )
    kind = NoCapacity if shortage.role == "capacity" else NoWorker
    return GiveUp(kind(f"{shortage.message}; try again later", retry_after_s=rules.retry_after_s))


def too_late(
    first_token_s: float, *, wanted_s: float, progress: Progress, rules: RetryRules, now: float
) -> GiveUp | None:
    """Refuse a new request whose best placement cannot bring a token before its deadline, while it costs nothing."""
    remaining_s = min(progress.deadline - now, wanted_s)
    if progress.attempts or not rules.refuse_beyond or first_token_s <= rules.refuse_beyond * remaining_s:
        return None
    return GiveUp(
        NoCapacity(
            f"the first token is expected in {first_token_s:.1f} s, later than this request wants it",
            retry_after_s=first_token_s - remaining_s,
        )
    )


def may_place(progress: Progress, rules: RetryRules) -> bool:
    """True if another prefill worker may be tried within this attempt."""
    return progress.placements < rules.max_placements


def deadline_error(progress: Progress) -> DeadlineExceeded:
    """Return what a client is told whose request took too long."""
    return DeadlineExceeded(
        f"the request's deadline passed after {progress.deadline - progress.started_at:.3g} s "
        f"with {progress.received} output tokens sent"
    )


def _exhausted(error: TandemError, progress: Progress, rules: RetryRules) -> TandemError:
    if isinstance(error, NoCapacity):
        return error
    message = f"{progress.failures} attempts in a row failed, the last with: {error.message}"
    return WorkerLost(message, retry_after_s=error.retry_after_s or rules.retry_after_s)
