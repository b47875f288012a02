"""`Generator` over the cluster: admission around a `SampleRun`, and what models the cluster serves.

Knows no HTTP and no text.
"""

import asyncio
from collections.abc import AsyncGenerator

from core.errors import BadRequest, DeadlineExceeded, UnknownModel
from core.worker import Registration, Role
from gateway.admission import Admission
from gateway.cluster import Cluster
from gateway.generation import Delta, Prompt, ServedModel
from gateway.sample import SampleRun, raised


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
        async with self._admission.permit(priority=prompt.priority, timeout_s=prompt.timeout_s):
            metrics.queue_seconds.observe(clock.now() - came)
            run = SampleRun(self._cluster, prompt, deadline=came + prompt.timeout_s)
            outcome = ""
            try:
                while not outcome:
                    delta = await run.next_delta()
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
                run.close()
