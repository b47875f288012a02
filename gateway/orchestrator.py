"""`Generator` over the cluster: admission around a `SampleRun`, and what models the cluster serves.

Knows no HTTP and no text.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from core.errors import BadRequest, DeadlineExceeded, TandemError, UnknownModel
from core.worker import Registration, Role
from gateway.admission import Admission
from gateway.cluster import Cluster
from gateway.generation import Delta, Prompt, ServedModel
from gateway.sample import SampleRun, raised
from gateway.session_gate import session_turn

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

    @asynccontextmanager
    async def _counting_errors(self) -> AsyncGenerator[None]:
        try:
            yield
        except TandemError as error:
            self._cluster.metrics.errors.labels(error.code).inc()
            raise

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Delta]:
        if prompt.model not in self._models and self._models:
            raise UnknownModel(f"the model `{prompt.model[:100]}` is not served here", param="model")
        if not prompt.token_ids:
            raise BadRequest("the prompt is empty; send at least one token", param="prompt")
        if prompt.timeout_s <= 0:
            raise DeadlineExceeded("the request's deadline had passed before it was admitted")
        metrics, clock = self._cluster.metrics, self._cluster.clock
        came = clock.now()
        self._cluster.budget.request()
        owner, cost = str(prompt.request_id), len(prompt.token_ids) + min(prompt.stop.max_tokens, COSTED_OUTPUT)
        permit = self._admission.permit(
            priority=prompt.priority, timeout_s=prompt.timeout_s, tenant=prompt.tenant, cost=cost, owner=owner
        )
        turn = session_turn(self._cluster.router.placer, prompt, clock, metrics.sessions)
        async with self._counting_errors(), turn, permit:
            admitted_at, first_at = clock.now(), None
            if prompt.timeline is not None:
                prompt.timeline.admitted = admitted_at
            metrics.queue_seconds.observe(admitted_at - came)
            metrics.time.labels("queue").inc(admitted_at - came)
            run = SampleRun(self._cluster, prompt, deadline=came + prompt.timeout_s)
            outcome = ""
            try:
                while not outcome:
                    delta = await run.next_delta()
                    if first_at is None and delta.token_ids:
                        first_at = clock.now()
                        metrics.time.labels("first_token").inc(first_at - admitted_at)
                    if delta.finish is not None:
                        # Everything is given back before the consumer sees the end.
                        run.close("finished")
                        outcome = delta.finish.value
                    yield delta
            except (Exception, asyncio.CancelledError, GeneratorExit) as error:
                outcome = outcome or raised(error)
                raise
            finally:
                metrics.samples.labels(outcome).inc()
                if first_at is not None:
                    metrics.time.labels("decode").inc(clock.now() - first_at)
                run.close()
                if self._cluster.recorder is not None and self._cluster.recorder.is_on:
                    self._cluster.recorder.record(run.work, at=came)
