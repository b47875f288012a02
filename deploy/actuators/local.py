"""The actuator of this machine: the launcher of `tandem up` does the work, over its control socket."""

import asyncio
from pathlib import Path
from typing import cast

from core.errors import ConfigError
from deploy.actuators.api import FENCE_CODE, Instance, StaleFence
from deploy.local.control import Reply, ask

LAUNCHER_TIMEOUT_S = 10.0
STATES = {"leaving": "draining"}
"""The launcher's words for states that every place knows under another name."""


class LocalActuator:
    """One foreground cluster. `remove_timeout_s` bounds a removal: its drain budget and some slack."""

    def __init__(self, run_dir: Path, *, remove_timeout_s: float) -> None:
        self._run_dir = run_dir
        self._remove_timeout_s = remove_timeout_s

    async def list(self) -> tuple[Instance, ...]:
        return instances_of(await self._ask({"command": "status"}))

    async def ensure(self, role: str, count: int, *, fence: int) -> None:
        await self._ask({"command": "ensure", "role": role, "count": count, "fence": fence})

    async def remove(self, worker_id: str, *, fence: int) -> None:
        await self._ask({"command": "remove", "worker": worker_id, "fence": fence}, self._remove_timeout_s)

    def describe(self) -> dict[str, object]:
        return {"place": "local", "run_dir": str(self._run_dir)}

    async def _ask(self, body: Reply, timeout_s: float = LAUNCHER_TIMEOUT_S) -> Reply:
        try:
            return await asyncio.to_thread(ask, self._run_dir, body, lambda _: None, timeout_s)
        except ConfigError as error:
            if error.message.startswith(FENCE_CODE):
                raise StaleFence(error.message.removeprefix(FENCE_CODE)) from error
            raise
        except TimeoutError as error:
            raise ConfigError(f"the launcher in {self._run_dir} did not answer within {timeout_s:g} s") from error


def instances_of(status: Reply) -> tuple[Instance, ...]:
    """Return the workers in a cluster's answer to `status`, sorted by id."""
    found = [
        Instance(
            id=str(process["id"]),
            role=str(process["role"]),
            state=STATES.get(str(process["state"]), str(process["state"])),
            reason=str(process["reason"]),
            domain=str(process.get("domain", "")),
        )
        for process in cast("list[Reply]", status["processes"])
        if process["role"] in {"prefill", "decode"}
    ]
    return tuple(sorted(found, key=lambda instance: instance.id))
