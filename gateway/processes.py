"""A gateway of several processes on one host: they share the HTTP port (SO_REUSEPORT), each has its own membership port.

This process starts them, starts those anew that crash, and passes a goodbye on. It serves nothing and shares nothing:
every process keeps its own view of the workers, which are told of all of them.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.config import native_environment
from core.errors import ConfigError
from core.ids import fresh_incarnation
from core.lifecycle import EXIT_DRAINED, EXIT_PREFLIGHT
from core.process import Departure, ReadyFile
from gateway.admin import KIND
from gateway.config import GatewayConfig
from gateway.http.server import bind, inherited

logger = logging.getLogger(__name__)

_TIED = "deploy.local.child"
"""Makes a process that ends with this one, however this one ends."""
READY_POLL_S = 0.05
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LATE_S = 5.0
"""After the drain budget: how long a process may take to say goodbye before it is killed."""


class ProcessGroup:
    """The processes of one gateway. `run` returns when all have left."""

    def __init__(self, config: GatewayConfig, argv: Sequence[str], departure: Departure) -> None:
        """`argv` is this process's command line, which the others get too, with their own settings behind."""
        self._config = config
        self._argv = tuple(argv)
        self._departure = departure
        self._running: dict[int, asyncio.subprocess.Process] = {}

    async def run(self) -> None:
        """Serve until the departure, then wait until every process has drained. Raises `ConfigError` at preflight."""
        config = self._config
        with self._reserve() as reserved:
            http_port = reserved.getsockname()[1]
            ports = _membership_ports(config)
            with tempfile.TemporaryDirectory(prefix="tandem-gateway-") as run_dir:
                keepers = [
                    asyncio.create_task(self._keep(number, self._settings(number, run_dir, http_port, ports)))
                    for number in range(config.processes)
                ]
                try:
                    await self._serve(keepers, Path(run_dir), f"{config.http.host}:{http_port}")
                finally:
                    self._tell(signal.SIGTERM)
                    await self._end(keepers)

    def _reserve(self) -> socket.socket:
        http = self._config.http
        if http.listener_fd >= 0:
            return inherited(http.listener_fd)
        # Bound, not listening: it takes no connections, but keeps the port ours between restarts.
        return bind(http.host, http.port, reuse_port=True)

    async def _serve(self, keepers: list[asyncio.Task[None]], run_dir: Path, http_address: str) -> None:
        ready = asyncio.create_task(self._all_ready(run_dir))
        leaving = asyncio.create_task(self._departure.wait())
        try:
            await asyncio.wait((ready, leaving, *keepers), return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
            if not ready.done():
                return
            facts = ready.result()
            ready_file = ReadyFile(self._config.run_dir, self._config.id)
            ready_file.write(
                {
                    **facts[0],
                    "id": self._config.id,
                    "kind": KIND,
                    "incarnation": fresh_incarnation(),
                    "http_address": http_address,
                    "processes": [{key: fact[key] for key in ("id", "pid", "membership_address")} for fact in facts],
                }
            )
            logger.info("%d processes serve at http://%s", len(facts), http_address)
            try:
                await asyncio.wait((leaving, *keepers), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ready_file.remove()
        finally:
            ready.cancel()
            leaving.cancel()
            await asyncio.gather(ready, leaving, return_exceptions=True)

    async def _all_ready(self, run_dir: Path) -> list[dict[str, Any]]:
        files = [run_dir / f"{self._name(number)}.json" for number in range(self._config.processes)]
        while True:
            if all(file.exists() for file in files):
                return [json.loads(file.read_bytes()) for file in files]
            await asyncio.sleep(READY_POLL_S)

    async def _keep(self, number: int, settings: Sequence[str]) -> None:
        """Run one process, again and again, until we leave."""
        pause_s = FIRST_PAUSE_S
        while not self._departure.has_begun:
            words = [word for setting in settings for word in ("--set", setting)]
            descriptor = self._config.http.listener_fd
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _TIED, str(os.getpid()), "gateway", *self._argv, *words),
                env=native_environment(),
                pass_fds=(descriptor,) if descriptor >= 0 else (),
            )
            self._running[number] = process
            if self._departure.has_begun:
                process.terminate()
            code = await process.wait()
            del self._running[number]
            if code == EXIT_DRAINED:
                return
            if code == EXIT_PREFLIGHT:
                raise ConfigError(f"process {self._name(number)} refused to start; its reason stands above")
            if not self._departure.has_begun:
                logger.error("process %s ended with %d; it is started anew in %g s", self._name(number), code, pause_s)
                await asyncio.wait((asyncio.ensure_future(self._departure.wait()),), timeout=pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _end(self, keepers: list[asyncio.Task[None]]) -> None:
        """Wait for goodbyes; a departure that was shortened is passed on."""
        while pending := [keeper for keeper in keepers if not keeper.done()]:
            left_s = self._departure.left_s
            await asyncio.wait(pending, timeout=min(left_s, 1.0) if left_s else LATE_S)
            if not left_s and not all(keeper.done() for keeper in keepers):
                logger.warning("processes that do not leave are killed")
                self._tell(signal.SIGKILL)
                await asyncio.wait(pending)
        failures = [error for keeper in keepers if (error := keeper.exception()) is not None]
        if failures:
            raise failures[0]

    def _tell(self, number: signal.Signals) -> None:
        for process in self._running.values():
            if process.returncode is None:
                process.send_signal(number)

    def _name(self, number: int) -> str:
        return f"{self._config.id}.{number + 1}"

    def _settings(self, number: int, run_dir: str, http_port: int, ports: Sequence[int]) -> list[str]:
        config = self._config
        host = config.membership.advertise_host or config.membership.host
        siblings = [f"{host}:{port}" for port in ports if port != ports[number]] + list(config.membership.siblings)
        return [
            "processes=1",
            f"id={self._name(number)}",
            f"run_dir={run_dir}",
            f"http.port={http_port}",
            f"http.reuse_port={'false' if config.http.listener_fd >= 0 else 'true'}",
            f"membership.port={ports[number]}",
            f"membership.siblings={json.dumps(siblings)}",
            f"listener.port={config.listener.port + number if config.listener.port else 0}",
            f"limits.share={config.limits.share / config.processes!r}",
        ]


def _membership_ports(config: GatewayConfig) -> list[int]:
    """Return one port per process: consecutive from the configured one, or free ones."""
    first = config.membership.port
    if first:
        return list(range(first, first + config.processes))
    with_ports = [socket.create_server((config.membership.host, 0)) for _ in range(config.processes)]
    ports = [each.getsockname()[1] for each in with_ports]
    for each in with_ports:
        each.close()
    return ports
