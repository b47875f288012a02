"""`Generator` over the cluster: admission around a `SampleRun`, and what models the cluster serves.

Knows no HTTP and no text.
"""

import asyncio
from collections.abc import Callable
from typing import Self

from core.errors import BadRequest, DeadlineExceeded, TandemError, UnknownModel
from core.worker import Registration, Role
from gateway.admission import Admission
from gateway.cluster import Cluster
from gateway.generation import Delta, Prompt, ServedModel, Tap
from gateway.leases import Lease
from gateway.sample import SampleRun, raised
from gateway.session_gate import begin_turn, end_turn

COSTED_OUTPUT = 256
"""Output tokens that fair queueing charges for at most: how many there will be is not known."""


class Orchestrator:
    """Implements `gateway.generation.Generator`. Event loop's thread only."""

    def __init__(self, cluster: Cluster, admission: Admission) -> None:
        self._cluster = cluster
        self._admission = admission
        self._models: dict[str, ServedModel] = {}

    def registered(self, registration: Registration) -> None:
        """Learn what a worker serves. Remembered after it is gone: a model without workers is busy, not unknown."""
        if registration.role is not Role.DECODE and registration.model in self._models:
            return
        others = [member.registration for member in self._cluster.directory.of_role(Role.DECODE, registration.model)]
        self._models[registration.model] = ServedModel(
            name=registration.model,
            max_tokens_total=max(told.max_tokens_total for told in (registration, *others)),
            vocab_size=registration.vocab_size,
            eos_token_ids=registration.eos_token_ids,
        )

    def models(self) -> tuple[ServedModel, ...]:
        return tuple(self._models.values())

    def generate(self, prompt: Prompt, tap: Tap | None = None) -> "SampleStream":
        return SampleStream(self._cluster, self._admission, self._check, prompt, tap)

    def _check(self, prompt: Prompt) -> None:
        if prompt.model not in self._models and self._models:
            raise UnknownModel(f"the model `{prompt.model[:100]}` is not served here", param="model")
        if not prompt.token_ids:
            raise BadRequest("the prompt is empty; send at least one token", param="prompt")
        if prompt.timeout_s <= 0:
            raise DeadlineExceeded("the request's deadline had passed before it was admitted")


class SampleStream:
    """The deltas of one sample. Whoever does not read it to its end closes it.

    No generator: the event loop keeps account of each of those, and each step through one costs as much as what it does.
    """

    __slots__ = (
        *("_admission", "_admitted_at", "_came", "_check", "_cluster", "_first_at", "_is_over", "_is_turn", "_lease"),
        *("_prompt", "_run", "_tap"),
    )

    def __init__(
        self, cluster: Cluster, admission: Admission, check: Callable[[Prompt], None], prompt: Prompt, tap: Tap | None
    ) -> None:
        """`check` raises what is wrong with the prompt."""
        self._cluster = cluster
        self._admission = admission
        self._check = check
        self._prompt = prompt
        self._tap = tap
        self._run: SampleRun | None = None
        self._lease: Lease | None = None
        self._is_turn = False
        self._is_over = False
        self._came = self._admitted_at = 0.0
        self._first_at: float | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._is_over:
            raise StopAsyncIteration
        try:
            run = self._run or await self._begin()
            delta = await run.next_delta()
        except TandemError as error:
            self._cluster.metrics.errors.labels(error.code).inc()
            self._end("error")
            raise
        except (Exception, asyncio.CancelledError) as error:
            self._end(raised(error))
            raise
        if self._first_at is None and delta.token_ids:
            self._first_at = self._cluster.clock.now()
            self._cluster.metrics.time_first_token.inc(self._first_at - self._admitted_at)
        if delta.finish is not None:
            # Everything is given back before the consumer sees the end.
            run.close("finished")
            self._end(delta.finish.value)
        return delta

    async def aclose(self) -> None:
        """No more is wanted. Idempotent; without effect after the last delta or an error."""
        self._end("closed")

    async def _begin(self) -> SampleRun:
        """Wait for admission. What is held by then is held whatever is raised."""
        prompt, cluster, clock = self._prompt, self._cluster, self._cluster.clock
        self._check(prompt)
        came = self._came = clock.now()
        cluster.budget.request()
        cost = len(prompt.token_ids) + min(prompt.stop.max_tokens, COSTED_OUTPUT)
        if prompt.session:
            await begin_turn(cluster.router.placer, prompt, clock)
            self._is_turn = True
        self._lease = await self._admission.acquire(
            prompt.tenant, prompt.priority, prompt.timeout_s, cost, prompt.request_id
        )
        now = self._admitted_at = clock.now()
        if prompt.timeline is not None:
            prompt.timeline.admitted = now
        cluster.metrics.queue_seconds.observe(now - came)
        cluster.metrics.time_queue.inc(now - came)
        self._run = SampleRun(cluster, prompt, deadline=came + prompt.timeout_s, tap=self._tap)
        return self._run

    def _end(self, outcome: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        cluster, prompt = self._cluster, self._prompt
        try:
            if self._run is not None:
                self._count(self._run, outcome)
        finally:
            if self._lease is not None:
                self._admission.release(prompt.tenant, self._lease)
            if self._is_turn:
                end_turn(cluster.router.placer, prompt, cluster.metrics.sessions)

    def _count(self, run: SampleRun, outcome: str) -> None:
        """Close the run, and tell how it went."""
        cluster = self._cluster
        run.close()
        cluster.metrics.samples.labels(outcome).inc()
        if self._first_at is not None:
            cluster.metrics.time_decode.inc(cluster.clock.now() - self._first_at)
        if cluster.recorder is not None and cluster.recorder.is_on:
            cluster.recorder.record(run.work, at=self._came)
