"""The actuator of a Ray cluster: its controller actor does the work, asked by commands as the local launcher is."""

from collections.abc import Awaitable, Callable

from core.errors import ConfigError
from deploy.actuators.api import FENCE_CODE, Instance, StaleFence
from deploy.actuators.local import instances_of
from deploy.local.control import Reply

Ask = Callable[[Reply], Awaitable[Reply]]
"""Sends one command and returns its answer; raises ConfigError with the controller's sentence."""


class RayActuator:
    """One cluster, reached through `ask`."""

    def __init__(self, ask: Ask, cluster: str) -> None:
        self._ask = ask
        self._cluster = cluster

    async def list(self) -> tuple[Instance, ...]:
        return instances_of(await self._ask({"command": "status"}))

    async def ensure(self, role: str, count: int, *, fence: int) -> None:
        await self._order({"command": "ensure", "role": role, "count": count, "fence": fence})

    async def remove(self, worker_id: str, *, fence: int) -> None:
        await self._order({"command": "remove", "worker": worker_id, "fence": fence})

    def describe(self) -> dict[str, object]:
        return {"place": "ray", "cluster": self._cluster}

    async def _order(self, body: Reply) -> None:
        try:
            await self._ask(body)
        except ConfigError as error:
            if error.message.startswith(FENCE_CODE):
                raise StaleFence(error.message.removeprefix(FENCE_CODE)) from error
            raise
