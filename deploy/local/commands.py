"""The commands of `tandem` on a running cluster, whatever place its processes run in.

One command is a JSON object, its answer another; between them comes progress. Knows no socket and no process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from core.errors import ConfigError
from deploy.actuators.api import FENCE_CODE, FenceGate, StaleFence
from deploy.local.control import Progress, Reply
from deploy.local.launcher import Launcher
from deploy.local.rollout import Rollout, check_tokenizer
from deploy.local.spec import ClusterSpec, Revision, check_spec, with_sets


def model_name(spec: ClusterSpec) -> str:
    """Return the name that clients use for the model."""
    return spec.served_name or spec.model


class Commands:
    """Carries out the commands of one cluster. `on_down` begins its end: it takes the budget in seconds (None: the
    cluster's own) and returns the answer.
    """

    def __init__(self, launcher: Launcher, on_down: Callable[[float | None], Reply]) -> None:
        self._launcher = launcher
        self._on_down = on_down
        self._gate = FenceGate()
        self._rollout: Rollout | None = None

    async def handle(self, command: Reply, progress: Progress) -> Reply:
        """Carry out one command; raises ConfigError for one that cannot be, in words for a person."""
        if self._rollout is not None and command.get("command") in {"scale", "drain", "ensure", "remove", "rollout"}:
            raise ConfigError("a rollout is running; wait for it, or end it with: tandem rollout --abort")
        match command.get("command"):
            case "status":
                return self._launcher.describe()
            case "scale":
                for role, count in cast("dict[str, int]", command["pools"]).items():
                    await self._launcher.ensure(role, count, progress)
                return self._launcher.describe()
            case "drain":
                await self._launcher.remove(str(command["worker"]), progress)
                return self._launcher.describe()
            case "ensure":
                self._check_fence(command)
                await self._launcher.order(str(command["role"]), int(cast("int", command["count"])))
                return {}
            case "remove":
                self._check_fence(command)
                if str(command["worker"]) in self._launcher.ids():
                    await self._launcher.remove(str(command["worker"]), progress)
                return {}
            case "rollout":
                await self._roll(command, progress)
                return self._launcher.describe()
            case "abort":
                if self._rollout is None:
                    raise ConfigError("no rollout is running")
                self._rollout.abort()
                return {}
            case "down":
                return self._on_down(cast("float | None", command.get("budget_s")))
            case other:
                raise ConfigError(f"unknown command {other!r}")

    async def _roll(self, command: Reply, progress: Progress) -> None:
        old = self._launcher.revision
        spec = with_sets(old.spec, cast("dict[str, list[str]]", command.get("sets", {})))
        # Clients go on asking for the name that they know, whatever directory it stands for.
        spec = msgspec.structs.replace(spec, served_name=model_name(old.spec))
        check_spec(spec)
        model_dir = Path(str(command.get("model_dir") or old.model_dir))
        check_tokenizer(old.model_dir, model_dir)
        target = Revision(number=old.number + 1, spec=spec, model_dir=model_dir)
        surge = int(cast("int", command.get("surge", 1)))
        self._rollout = Rollout(self._launcher, target, surge=surge, report=progress)
        try:
            await self._rollout.run()
        finally:
            self._rollout = None

    def _check_fence(self, command: Reply) -> None:
        try:
            self._gate.check(int(cast("int", command["fence"])))
        except StaleFence as error:
            raise ConfigError(FENCE_CODE + error.message) from error
