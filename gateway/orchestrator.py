"""`Generator` over the cluster: admission around a `SampleRun`, and what models the cluster serves.

Knows no HTTP and no text.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

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

    async def generate(self, prompt: Prompt, tap: Tap | None = None) -> AsyncGenerator[Delta]:
        self._check(prompt)
        cluster, clock = self._cluster, self._cluster.clock
        came = clock.now()
        cluster.budget.request()
        owner, cost = str(prompt.request_id), len(prompt.token_ids) + min(prompt.stop.max_tokens, COSTED_OUTPUT)
        lease: Lease | None = None
        is_turn = False
        try:
            if prompt.session:
                await begin_turn(cluster.router.placer, prompt, clock)
                is_turn = True
            lease = await self._admission.acquire(prompt.tenant, prompt.priority, prompt.timeout_s, cost, owner)
            self._note_admitted(prompt, came)
            run = SampleRun(cluster, prompt, deadline=came + prompt.timeout_s, tap=tap)
            progress = _Stretch(cluster, clock.now())
            try:
                while not progress.outcome:
                    delta = await run.next_delta()
                    if progress.first_at is None and delta.token_ids:
                        progress.begin(clock.now())
                    if delta.finish is not None:
                        # Everything is given back before the consumer sees the end.
                        run.close("finished")
                        progress.outcome = delta.finish.value
                    yield delta
            except (Exception, asyncio.CancelledError, GeneratorExit) as error:
                progress.outcome = progress.outcome or raised(error)
                raise
            finally:
                progress.end(clock.now())
                run.close()
                if cluster.recorder is not None and cluster.recorder.is_on:
                    cluster.recorder.record(run.work, at=came)
        except TandemError as error:
            cluster.metrics.errors.labels(error.code).inc()
            raise
        finally:
            if lease is not None:
                self._admission.release(prompt.tenant, lease)
            if is_turn:
                end_turn(cluster.router.placer, prompt, cluster.metrics.sessions)

    def _check(self, prompt: Prompt) -> None:
        if prompt.model not in self._models and self._models:
            raise UnknownModel(f"the model `{prompt.model[:100]}` is not served here", param="model")
        if not prompt.token_ids:
            raise BadRequest("the prompt is empty; send at least one token", param="prompt")
        if prompt.timeout_s <= 0:
            raise DeadlineExceeded("the request's deadline had passed before it was admitted")

    def _note_admitted(self, prompt: Prompt, came: float) -> None:
        metrics, now = self._cluster.metrics, self._cluster.clock.now()
        if prompt.timeline is not None:
            prompt.timeline.admitted = now
        metrics.queue_seconds.observe(now - came)
        metrics.time.labels("queue").inc(now - came)


@dataclass(slots=True)
class _Stretch:
    """Where the time of one admitted sample went."""

    cluster: Cluster
    admitted_at: float
    first_at: float | None = None
    outcome: str = ""

    def begin(self, now: float) -> None:
        """The first token came."""
        self.first_at = now
        self.cluster.metrics.time.labels("first_token").inc(now - self.admitted_at)

    def end(self, now: float) -> None:
        """It is over."""
        metrics = self.cluster.metrics
        metrics.samples.labels(self.outcome).inc()
        if self.first_at is not None:
            metrics.time.labels("decode").inc(now - self.first_at)
