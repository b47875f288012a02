"""A local cluster in the foreground: run directory, model, launcher, control socket, signals.

The composition root of `tandem up`; prints what a person needs and returns when the cluster is gone.
"""

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from core.clock import Clock
from core.errors import ConfigError
from deploy.local.commands import Commands, model_name
from deploy.local.control import ControlServer, Reply
from deploy.local.launcher import Launcher
from deploy.local.spec import ClusterSpec

LOCK_NAME = "launcher.lock"


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

    async def run(self) -> int:
        """Start, serve until a signal or `tandem down`, end everything."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        with claim(self._run_dir):
            control = ControlServer(self._run_dir, Commands(self.launcher, self._on_down).handle)
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

    def _on_down(self, budget_s: float | None) -> Reply:
        self._budget_s = self._spec.drain_s if budget_s is None else budget_s
        self._stop.set()
        return {"pid": os.getpid()}


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
