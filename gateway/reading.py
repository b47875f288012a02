"""Reads what the attempts of one sample bring: tokens by position, usage of the first attempt, the need of a prefill worker.

Keeps the figures that a sample's consumer, the directory and the metrics are told. Submits nothing and decides no
retry. One task of the event loop uses it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from core.errors import Draining, InvariantError, NoWorker, TransferFailed, WorkerLost
from core.handover import TokenLogprobs
from core.ids import Handle, WorkerId
from core.request import FinishReason, Floors
from core.stream import Finished, NeedPrefill, Started
from gateway.attempt import Progress, may_place
from gateway.cluster import Cluster
from gateway.dispatch import Dispatch
from gateway.generation import Delta
from gateway.leases import Lease
from gateway.mailbox import Failure, Item, Mailbox, Run
from gateway.router import Placed, Work, target_of
from gateway.worker_link import WorkerLink


@dataclass(slots=True)
class Attempt:
    """One submission: its handle, where it went, and what is counted for it."""

    handle: Handle
    link: WorkerLink
    mailbox: Mailbox
    placed: Placed
    dispatch: Dispatch
    num_tokens: int
    lease: Lease


@dataclass(slots=True)
class Step:
    """What one take of the mailbox amounts to."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None = None
    cached: int | None = None
    failure: Failure | None = None

    @property
    def has_news(self) -> bool:
        """True if the consumer has something to see."""
        return bool(self.tokens) or self.finish is not None or self.cached is not None

    def delta(self) -> Delta:
        """Return it as the consumer sees it."""
        return Delta(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish=self.finish,
            num_cached_tokens=self.cached,
        )


class Reader:
    """The reading half of a sample; `progress` and `work` are the sample's, written here too."""

    def __init__(self, cluster: Cluster, work: Work, progress: Progress) -> None:
        self._cluster = cluster
        self._work = work
        self._output = work.output
        self._progress = progress
        self.num_cached = -1
        """Cached prompt tokens that the first attempt reported; -1 before."""
        self._floors: tuple[bytes, Floors] | None = None
        """The namespace of the first attempt, and what it computed with."""
        self.is_begun = False
        """Tokens of this attempt came: a plain run needs no book-keeping but its count, and `settle` until it is steady."""
        self.is_steady = False
        """Enough tokens of it came."""

    def floors_for(self, namespace: bytes) -> Floors | None:
        """Return what the next attempt computes with: the same as the first, where that means the same."""
        return self._floors[1] if self._floors is not None and self._floors[0] == namespace else None

    def read(self, attempt: Attempt, items: Iterable[Item]) -> Step:
        """Take what the mailbox held, in order. The attempt is over if the step has a finish or a failure."""
        step = Step([], [])
        try:
            for item in items:
                match item:
                    case Run():
                        self._take_tokens(attempt, item, step)
                    case Started():
                        self._take_start(attempt, item, step)
                    case Finished():
                        self._take_finish(attempt, item, step)
                    case NeedPrefill():
                        self._replace_prefill(attempt, item)
                    case Failure():
                        step.failure = item
        except TransferFailed as error:
            step.failure = Failure(error, by_worker=False)
            self._cluster.metrics.retries.labels("incomplete").inc()
        return step

    def _take_tokens(self, attempt: Attempt, run: Run, step: Step) -> None:
        tokens, logprobs = self._output.accept(run.position, run.tokens, run.logprobs)
        metrics = self._cluster.metrics
        if len(tokens) < len(run.tokens):
            metrics.surplus_tokens.inc(len(run.tokens) - len(tokens))
        if not self._progress.received and tokens:
            metrics.first_token_seconds.observe(self._cluster.clock.now() - self._progress.started_at)
        step.tokens.extend(tokens)
        step.logprobs.extend(logprobs)
        self._progress.received = len(self._output)
        if self._progress.interrupted_at is not None and tokens:
            self._progress.interrupted_at = None
            self._work.avoid_decode.clear()
        self._computed(attempt)
        self.is_begun = self.is_begun or bool(tokens)
        self.settle(attempt)

    def settle(self, attempt: Attempt) -> None:
        """Look whether enough tokens of the attempt have come to call its workers sound."""
        if self._work.num_tokens - attempt.num_tokens >= self._cluster.retries.steady_tokens:
            # Not at the end only: a breaker's probe may stream for minutes, and nobody else is let in before.
            self._cluster.directory.succeeded(attempt.placed.decode)
            self.is_steady = True

    def _computed(self, attempt: Attempt) -> None:
        """The prompt is done: compare with what was predicted."""
        waited_s = attempt.dispatch.computed()
        if waited_s:
            self._cluster.metrics.predicted_ratio.observe(attempt.placed.choice.wait_s / waited_s)

    def _take_start(self, attempt: Attempt, started: Started, step: Step) -> None:
        cluster = self._cluster
        self._computed(attempt)
        landing_s = cluster.clock.now() - (attempt.dispatch.computed_at or cluster.clock.now())
        cluster.router.handed_over(started, attempt.placed, attempt.num_tokens, landing_s)
        if started.bytes_pulled:
            cluster.metrics.bytes_pulled.inc(started.bytes_pulled)
        timeline, now = self._work.prompt.timeline, cluster.clock.now()
        if timeline is not None:
            timeline.prompt_computed = timeline.prompt_computed or now
            timeline.cached_tokens = timeline.cached_tokens or max(0, started.num_cached_tokens)
            if started.bytes_pulled:
                timeline.handed_over, timeline.bytes_pulled = now, started.bytes_pulled
        if self._floors is None:
            self._floors = attempt.placed.decode.registration.namespace, started.floors
        if self.num_cached < 0:
            # Usage is that of the first attempt that came so far, whatever later ones find in their caches.
            self.num_cached = step.cached = max(0, started.num_cached_tokens)
            if self.num_cached:
                cluster.metrics.cached_tokens.inc(self.num_cached)
            cluster.metrics.prompt_tokens.inc(len(self._work.prompt.token_ids))

    def _take_finish(self, attempt: Attempt, finished: Finished, step: Step) -> None:
        self._output.check_complete(finished.num_output_tokens)
        try:
            step.finish = FinishReason(finished.reason)
        except ValueError:
            error = InvariantError(f"the worker ended the request with the unknown reason {finished.reason!r}")
            step.failure = Failure(error, by_worker=True)
            return
        if finished.recomputed_tokens:
            self._cluster.metrics.recomputed_tokens.inc(finished.recomputed_tokens)
        self._cluster.directory.succeeded(attempt.placed.decode)

    def _replace_prefill(self, attempt: Attempt, need: NeedPrefill) -> None:
        """Name another prefill worker, or nobody; the decode worker keeps what it has."""
        cluster = self._cluster
        lost = cluster.directory.find(WorkerId(need.failed))
        if lost is not None:
            self._work.avoid_prefill.add(lost)
            if need.code in (WorkerLost.code, TransferFailed.code):
                cluster.directory.failed(lost)
            elif need.code == Draining.code:
                cluster.directory.draining(lost)
        self._progress.placements += 1
        cluster.metrics.placements.inc()
        decode, another = attempt.placed.decode, None
        if may_place(self._progress, cluster.retries):
            another = cluster.router.place_prefill(self._work, decode)
        may_compute = cluster.routing.local_fallback or decode.registration.prefill_mode != "remote"
        if another is None and not may_compute:
            error = NoWorker(f"prefill worker {need.failed} failed and there is no other: {need.message}")
            attempt.mailbox.note(Failure(error, by_worker=True))
            return
        attempt.dispatch.place(another, seconds=attempt.placed.choice.prefill_s)
        attempt.link.place(attempt.handle, target_of(another))
