"""The body of the actor `pd-controller`: the launcher, the commands of `tandem`, and the scaler. Knows no Ray."""

import asyncio
import json
import logging
from pathlib import Path

from core.clock import SystemClock
from core.config import load
from core.errors import ConfigError, TandemError
from core.process import Departure
from deploy.actuators.ray import RayActuator
from deploy.controller.app import control
from deploy.controller.config import ControllerConfig
from deploy.local.commands import Commands
from deploy.local.control import Progress, Reply
from deploy.local.spec import overrides
from deploy.ray.api import RayPort
from deploy.ray.launcher import RayLauncher
from deploy.ray.plan import RayPlan

_LOG = logging.getLogger(__name__)
PROGRESS_POLL_S = 0.1
SCALER_LEAVE_S = 5.0


class RayController:
    """One cluster on Ray: begins at its construction; `handle` takes any number of commands meanwhile."""

    def __init__(self, plan: RayPlan, port: RayPort, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._autoscale = plan.spec.autoscale
        self._lines: list[str] = []
        self._clock = SystemClock()
        self._launcher = RayLauncher(plan=plan, port=port, run_dir=run_dir, clock=self._clock, report=self._say)
        self._commands = Commands(self._launcher, lambda _: {})
        self._beginning = asyncio.create_task(self._begin())
        self._scaling: tuple[Departure, asyncio.Task[None]] | None = None

    async def handle(self, command: Reply, progress: Progress) -> Reply:
        """Carry out one command; raises a TandemError for one that cannot be."""
        match command.get("command"):
            case "wait":
                return await self._wait(progress)
            case "down":
                return await self._down(command.get("budget_s"))
            case "status":
                return {**self._launcher.describe(), "epoch": self._launcher.epoch}
            case other if not self._beginning.done():
                raise ConfigError(f"the cluster is still starting; ask for {other!r} once it serves")
            case "rollout":
                answer = await self._commands.handle(command, progress)
                if self._scaling is not None:  # its rules may be new
                    await self._stop_scaler()
                    self._scaling = self._start_scaler()
                return answer
            case _:
                return await self._commands.handle(command, progress)

    def _say(self, text: str) -> None:
        _LOG.info("%s", text)
        self._lines.append(text)

    async def _begin(self) -> None:
        try:
            await self._launcher.begin()
        except TandemError as error:
            self._say(f"not all is well: {error.message}")
            raise
        finally:
            if self._autoscale:
                self._scaling = self._start_scaler()

    async def _wait(self, progress: Progress) -> Reply:
        """Pass on what happens until the cluster serves; raises why it does not."""
        told = 0
        while True:
            is_done = self._beginning.done()
            for line in self._lines[told:]:
                progress(line)
            told = len(self._lines)
            if is_done:
                await self._beginning
                return self._launcher.describe()
            await asyncio.sleep(PROGRESS_POLL_S)

    async def _down(self, budget_s: object) -> Reply:
        self._beginning.cancel()
        await self._stop_scaler()
        own_s = self._launcher.revision.spec.drain_s
        await self._launcher.down(own_s if budget_s is None else float(str(budget_s)))
        return {}

    async def _stop_scaler(self) -> None:
        if self._scaling is not None:
            departure, task = self._scaling
            departure.begin()
            await asyncio.wait({task})
            self._scaling = None

    def _start_scaler(self) -> tuple[Departure, asyncio.Task[None]]:
        """Size the pools from here: this actor is the one writer, its epoch the fence."""
        self._run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = self._run_dir / "controller.secret"
        secret.touch(mode=0o600)
        secret.write_text(self._launcher.secret)
        own = {"place": "ray", "secret_file": str(secret), "run_dir": str(self._run_dir)}
        sets = [f"controller.{key}={json.dumps(value)}" for key, value in own.items()]
        sets += [f"controller.gateways={json.dumps(self._launcher.gateways)}"]
        spec = self._launcher.revision.spec
        config = load(ControllerConfig, None, [*sets, *overrides(spec, "controller")])
        departure = Departure(self._clock, SCALER_LEAVE_S)
        actuator = RayActuator(lambda body: self._commands.handle(body, self._say), spec.name)
        return departure, asyncio.create_task(control(config, departure, actuator, self._launcher.epoch))
