"""One sample on its way through the cluster: submits attempts, reads what comes back, recovers, ends exactly once.

All decisions are asked of `gateway.attempt`; this file does what they say. One task of the event loop uses it.
"""

import asyncio
import logging
from collections.abc import Sequence

from core.errors import DeadlineExceeded, Draining, InvariantError, WorkerLost
from core.handover import TokenLogprobs
from core.ids import RequestId
from core.request import FinishReason
from gateway.attempt import (
    Again,
    GiveUp,
    Progress,
    after_failure,
    after_shortage,
    count_failure,
    deadline_error,
    too_late,
)
from gateway.cluster import Cluster
from gateway.dispatch import Dispatch
from gateway.generation import Delta, Prompt, Tap
from gateway.mailbox import Failure, Run
from gateway.reading import Attempt, Reader
from gateway.resume import Output, build_request, finish_of
from gateway.router import Placed, Work, target_of
from gateway.routing.job import Shortage
from gateway.timeline import Timeline

logger = logging.getLogger(__name__)


class SampleRun:
    """Call `next_delta` until one has `finish` or it raises; then, in any case, `close`."""

    def __init__(self, cluster: Cluster, prompt: Prompt, deadline: float, tap: Tap | None = None) -> None:
        """`tap` as in `Generator.generate`."""
        self._cluster = cluster
        self._tap = tap
        self._prompt = prompt
        self._request_id = RequestId(f"{prompt.request_id}-{prompt.sampling.sample_index}")
        self._output = Output()
        self._work = Work(prompt, self._output)
        now = cluster.clock.now()
        self._progress = Progress(started_at=now, deadline=deadline)
        self._reader = Reader(cluster, self._work, self._progress)
        self._counted = 0
        self._eos: tuple[int, ...] = ()
        self._attempt: Attempt | None = None
        self._failure: Failure | None = None
        self._is_late = False
        self._deadline_timer = asyncio.get_running_loop().call_later(max(0.0, deadline - now), self._deadline_passed)

    async def next_delta(self) -> Delta:
        """Wait for news. Raises a `TandemError` when the sample ends badly."""
        while True:
            if self._attempt is not None and self._failure is None:
                items = await self._attempt.mailbox.take()
                if self._reader.is_begun and len(items) == 1 and isinstance(items[0], Run):
                    run = items[0]
                    if run.position == len(self._output.tokens):
                        return self._plain_delta(self._attempt, run.tokens, run.logprobs)
                step = self._reader.read(self._attempt, items)
                if self._reader.is_begun and self._tap is not None:
                    self._attempt.mailbox.tap = self._take_at_once
                self._failure = step.failure
                if step.finish is not None:
                    self._end_attempt("finished")
                if step.has_news:
                    return step.delta()
                continue
            failure, self._failure = self._failure, None
            if failure is not None:
                await self._recover(failure)
            if self._attempt is None:
                finish = self._own_finish()
                if finish is not None:
                    return Delta(finish=finish)
                self._attempt = await self._start()

    def _plain_delta(self, attempt: Attempt, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Delta:
        """Count tokens that follow on those before without a gap."""
        self._output.tokens += tokens
        self._progress.received = len(self._output.tokens)
        if not self._reader.is_steady:
            self._reader.settle(attempt)
        return Delta(token_ids=tuple(tokens), logprobs=tuple(logprobs))

    def _take_at_once(self, position: int, tokens: list[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        attempt = self._attempt
        if self._tap is None or attempt is None or position != len(self._output.tokens):
            return False
        if not self._tap(self._plain_delta(attempt, tokens, logprobs)):
            # Nothing is in it but the call to come and see.
            attempt.mailbox.note(Run(len(self._output.tokens), []))
        return True

    def close(self, reason: str = "the client left") -> None:
        """End whatever still runs on the workers. Idempotent."""
        self._deadline_timer.cancel()
        self._end_attempt(reason)
        self._cluster.metrics.output_tokens.inc(len(self._output) - self._counted)
        self._counted = len(self._output)

    @property
    def work(self) -> Work:
        """What was placed, over all attempts."""
        return self._work

    @property
    def has_output(self) -> bool:
        """True once a token arrived."""
        return len(self._output) > 0

    # Submitting

    async def _start(self) -> Attempt | None:
        """Place and submit the next attempt; None: the worker was lost in between, go round again."""
        cluster, progress = self._cluster, self._progress
        while True:
            if self._is_late:
                raise deadline_error(progress)  # it passed between two attempts: no mailbox has heard of it
            begun = cluster.clock.now()
            placed = cluster.router.place(self._work)
            took_s = cluster.clock.now() - begun
            cluster.metrics.route_seconds.observe(took_s)
            cluster.metrics.time_route.inc(took_s)
            if isinstance(placed, Placed):
                hopeless = too_late(
                    placed.choice.wait_s,
                    wanted_s=self._prompt.first_token_s,
                    progress=progress,
                    rules=cluster.retries,
                    now=begun,
                )
                if hopeless is not None:
                    raise hopeless.error
                return self._submit(placed)
            await self._wait_for_workers(placed, progress)

    async def _wait_for_workers(self, shortage: Shortage, progress: Progress) -> None:
        cluster = self._cluster
        verdict = after_shortage(shortage, progress=progress, rules=cluster.retries, now=cluster.clock.now())
        if isinstance(verdict, GiveUp):
            raise verdict.error
        if progress.interrupted_at is None:
            progress.interrupted_at = cluster.clock.now()
            cluster.metrics.retries.labels("no_worker").inc()
        cluster.metrics.time.labels("no_worker").inc(verdict.pause_s)
        await asyncio.sleep(verdict.pause_s)

    def _submit(self, placed: Placed) -> Attempt | None:
        cluster, progress = self._cluster, self._progress
        handle = cluster.links.fresh_handle()
        request = build_request(
            self._prompt,
            request_id=self._request_id,
            attempt=progress.attempts,
            output=self._output,
            page_hashes=placed.page_hashes,
            timeout_s=max(0.001, progress.deadline - cluster.clock.now()),
            num_cached_tokens=self._reader.num_cached,
            floors=self._reader.floors_for(placed.decode.registration.namespace),
        )
        link = cluster.links.ensure(placed.decode.registration)
        progress.attempts += 1
        progress.placements = 0
        cluster.metrics.attempts.inc()
        cluster.metrics.route_choices.labels(placed.reason).inc()
        cluster.metrics.prefix_share.observe(placed.choice.matched_prefill / self._work.num_tokens)
        if placed.prefill is None and placed.decode.registration.prefill_mode == "remote":
            cluster.metrics.fallbacks.inc()
        try:
            mailbox = link.submit(handle, request, target_of(placed.prefill))
        except WorkerLost as error:
            self._work.avoid_decode.add(placed.decode)
            self._failure = Failure(error, by_worker=False)
            return None
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: attempt %d at prefill %s, decode %s, predicted %.4f s, %d of %d tokens cached",
                self._request_id,
                request.attempt,
                placed.prefill.worker_id if placed.prefill is not None else "none",
                placed.decode.worker_id,
                placed.choice.seconds,
                placed.choice.matched_prefill,
                self._work.num_tokens,
            )
        self._eos = placed.decode.registration.eos_token_ids
        if self._prompt.timeline is not None:
            self._note_placed(self._prompt.timeline, placed)
        dispatch = Dispatch(
            cluster.directory,
            prefill=placed.prefill,
            decode=placed.decode,
            tokens=placed.uncached_tokens,
            seconds=placed.choice.prefill_s,
            context=self._work.num_tokens,
        )
        lease = cluster.leases.take("attempt", f"{self._request_id} at {placed.decode.worker_id}")
        return Attempt(handle, link, mailbox, placed, dispatch, self._work.num_tokens, lease)

    def _note_placed(self, timeline: Timeline, placed: Placed) -> None:
        if timeline.submitted is None:
            timeline.submitted = self._cluster.clock.now()
        timeline.attempts = self._progress.attempts
        timeline.decode_worker = placed.decode.worker_id
        timeline.prefill_worker = placed.prefill.worker_id if placed.prefill is not None else ""

    # Recovering

    async def _recover(self, failure: Failure) -> None:
        """Clean up the failed attempt, then return to make another, or raise."""
        cluster, progress, error, now = self._cluster, self._progress, failure.error, self._cluster.clock.now()
        self._note_decode(failure)
        self._end_attempt(error.message)
        if self._own_finish() is not None:
            return  # only the goodbye was lost
        count_failure(error, by_worker=failure.by_worker, progress=progress, rules=cluster.retries, now=now)
        verdict = after_failure(
            error,
            by_worker=failure.by_worker,
            progress=progress,
            rules=cluster.retries,
            budget=cluster.budget,
            now=now,
        )
        if isinstance(verdict, GiveUp):
            raise verdict.error
        self._note_retry(failure, verdict)
        if verdict.pause_s > 0:
            cluster.metrics.time.labels("retry_pause").inc(verdict.pause_s)
            await asyncio.sleep(verdict.pause_s)

    def _own_finish(self) -> FinishReason | None:
        return finish_of(self._output.tokens, self._prompt.stop, self._eos)

    def _note_decode(self, failure: Failure) -> None:
        """Let the directory know what the failure says of the decode worker."""
        if self._attempt is None:
            return
        decode, directory = self._attempt.placed.decode, self._cluster.directory
        if failure.error.retryable or isinstance(failure.error, InvariantError):
            self._work.avoid_decode.add(decode)
        if isinstance(failure.error, Draining):
            directory.draining(decode)
        elif failure.by_worker and isinstance(failure.error, (WorkerLost, InvariantError)):
            directory.failed(decode, self._attempt.lease.since)

    def _note_retry(self, failure: Failure, verdict: Again) -> None:
        metrics = self._cluster.metrics
        metrics.retries.labels("refused" if failure.by_worker else "worker_lost").inc()
        if self.has_output:
            metrics.resumes.inc()
        logger.info(
            "request %s: attempt %d ended after %d tokens (%s); another in %.2f s",
            self._request_id,
            self._progress.attempts,
            len(self._output),
            failure.error.message,
            verdict.pause_s,
        )

    def _end_attempt(self, reason: str) -> None:
        attempt, self._attempt = self._attempt, None
        self._reader.is_begun = self._reader.is_steady = False
        if attempt is not None:
            attempt.mailbox.tap = None
            attempt.link.release(attempt.handle, reason)
            attempt.dispatch.close()
            self._cluster.leases.give_back(attempt.lease)

    def _deadline_passed(self) -> None:
        error = DeadlineExceeded("the request's deadline passed")
        self._is_late = True
        if self._attempt is not None:
            self._attempt.mailbox.note(Failure(error, by_worker=False))


def raised(error: BaseException) -> str:
    """Return the outcome label of an ending: `error` for what a client is told, `closed` for its own leaving."""
    return "closed" if isinstance(error, (GeneratorExit, asyncio.CancelledError)) else "error"
