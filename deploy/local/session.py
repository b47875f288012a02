"""A local cluster in the foreground: run directory, model, launcher, control socket, signals.

The composition root of `tandem up`; prints what a person needs and returns when the cluster is gone.
"""

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast

import msgspec

from core.clock import Clock
from core.errors import ConfigError
from deploy.actuators.api import FENCE_CODE, FenceGate, StaleFence
from deploy.local.control import ControlServer, Progress, Reply
from deploy.local.launcher import Launcher
from deploy.local.rollout import Rollout
from deploy.local.spec import ClusterSpec, Revision, check_spec, with_sets

LOCK_NAME = "launcher.lock"


def model_name(spec: ClusterSpec) -> str:
    """Return the name that clients use for the model."""
    return spec.served_name or spec.model


def curl_line(address: str, model: str) -> str:
    """Return a command that a person can paste to get a streamed answer."""
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    return f"curl -N http://{address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


class Session:
    """One foreground cluster. `run` returns the exit code."""

    def __init__(
        self, *, spec: ClusterSpec, run_dir: Path, model_dir: Path, clock: Clock, report: Callable[[str], None]
    ) -> None:
        self.launcher = Launcher(spec=spec, run_dir=run_dir, model_dir=model_dir, clock=clock, report=report)
        self._spec = spec
        self._run_dir = run_dir
        self._report = report
        self._stop = asyncio.Event()
        self._budget_s = spec.drain_s
        self._gate = FenceGate()
        self._rollout: Rollout | None = None

    async def run(self) -> int:
        """Start, serve until a signal or `tandem down`, end everything."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        with claim(self._run_dir):
            control = ControlServer(self._run_dir, self._handle)
            await control.start()
            try:
                starting = asyncio.ensure_future(self.launcher.start())
                stopped = asyncio.ensure_future(self._stop.wait())
                await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    address = str(self.launcher.describe()["http_address"])
                    self._report(f"serving {model_name(self._spec)} at http://{address}")
                    self._report(curl_line(address, model_name(self._spec)))
                    await stopped
                else:
                    starting.cancel()
            finally:
                await self.launcher.down(self._budget_s)
                await control.close()
        self._report("all processes are gone")
        return 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._report("second signal: still draining, at most 5 s more")
            self._budget_s = min(self._budget_s, 5.0)
        self._stop.set()

    async def _handle(self, command: Reply, progress: Progress) -> Reply:
        if self._rollout is not None and command.get("command") in {"scale", "drain", "ensure", "remove", "rollout"}:
            raise ConfigError("a rollout is running; wait for it, or end it with: tandem rollout --abort")
        match command.get("command"):
            case "status":
                return self.launcher.describe()
            case "scale":
                for role, count in cast("dict[str, int]", command["pools"]).items():
                    await self.launcher.ensure(role, count, progress)
                return self.launcher.describe()
            case "drain":
                await self.launcher.remove(str(command["worker"]), progress)
                return self.launcher.describe()
            case "ensure":
                self._check_fence(command)
                await self.launcher.order(str(command["role"]), int(cast("int", command["count"])))
                return {}
            case "remove":
                self._check_fence(command)
                if str(command["worker"]) in self.launcher.ids():
                    await self.launcher.remove(str(command["worker"]), progress)
                return {}
            case "rollout":
                await self._roll(command, progress)
                return self.launcher.describe()
            case "abort":
                if self._rollout is None:
                    raise ConfigError("no rollout is running")
                self._rollout.abort()
                return {}
            case "down":
                self._budget_s = float(cast("float", command.get("budget_s", self._spec.drain_s)))
                self._stop.set()
                return {"pid": os.getpid()}
            case other:
                raise ConfigError(f"unknown command {other!r}")

    async def _roll(self, command: Reply, progress: Progress) -> None:
        old = self.launcher.revision
        spec = with_sets(old.spec, cast("dict[str, list[str]]", command.get("sets", {})))
        # Clients go on asking for the name that they know, whatever directory it stands for.
        spec = msgspec.structs.replace(spec, served_name=model_name(old.spec))
        check_spec(spec)
        model_dir = Path(str(command.get("model_dir") or old.model_dir))
        target = Revision(number=old.number + 1, spec=spec, model_dir=model_dir)
        surge = int(cast("int", command.get("surge", 1)))
        self._rollout = Rollout(self.launcher, target, surge=surge, report=progress)
        try:
            await self._rollout.run()
        finally:
            self._rollout = None

    def _check_fence(self, command: Reply) -> None:
        try:
            self._gate.check(int(cast("int", command["fence"])))
        except StaleFence as error:
            raise ConfigError(FENCE_CODE + error.message) from error


class claim:  # noqa: N801 - reads as a verb in a with statement
    """Hold the run directory: two launchers on one directory would end each other's processes."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_NAME
        self._file: TextIO | None = None

    def __enter__(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = self._path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"a cluster already runs in {self._path.parent}; stop it with `tandem down` or choose another --name"
            ) from error

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
