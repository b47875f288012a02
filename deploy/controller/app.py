"""Composes the controller process: lock, gateways, place, health listener."""

import asyncio
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from core.clock import SystemClock
from core.config import read_secret
from core.errors import ConfigError
from core.ids import fresh_incarnation
from core.lifecycle import State
from core.listener import Listener, Probes
from core.metrics import Metrics
from core.process import Departure, ReadyFile
from core.rpc.admin import AdminClient
from core.rpc.proof import Proof
from core.tls import check_tls
from deploy.actuators.api import Actuator
from deploy.actuators.factory import actuator_for
from deploy.controller.config import ControllerConfig, ControllerSection
from deploy.controller.journal import Journal
from deploy.controller.lock import FileLock
from deploy.controller.loop import Controller
from deploy.controller.metrics import ScalerMetrics
from deploy.controller.poll import GatewayPoll


async def serve(config: ControllerConfig, departure: Departure) -> None:
    """Run until told to leave, or until another controller takes over."""
    section = config.controller
    with ExitStack() as stack:
        fence = 0
        if not section.advisory:
            lock = FileLock(Path(section.run_dir or "."))
            fence = lock.acquire()
            stack.callback(lock.release)
        await control(config, departure, actuator_for(section.place, section.target), fence)


async def control(config: ControllerConfig, departure: Departure, actuator: Actuator, fence: int) -> None:
    """As `serve`, by a controller that holds its lock already."""
    section = config.controller
    if not section.gateways:
        raise ConfigError("controller.gateways is empty; name the membership address of every gateway process")
    clock, metrics = SystemClock(), Metrics()
    async with AsyncExitStack() as stack:
        proof = proof_of(section)
        controller = Controller(
            actuator=actuator,
            source=GatewayPoll(AdminClient(proof), section.gateways, clock),
            rules=config.autoscale,
            clock=clock,
            fence=fence,
            advisory=section.advisory,
            journal=Journal(Path(section.run_dir) / f"{section.id}.decisions.jsonl" if section.run_dir else None),
            metrics=ScalerMetrics(metrics),
        )
        stack.push_async_callback(controller.close)
        listener = Listener(section.http_host, section.http_port, _probes(section.id, metrics, departure))
        port = listener.start()
        stack.callback(listener.close)
        ready = ReadyFile(section.run_dir, section.id)
        ready.write({"http_address": f"{section.http_host}:{port}", "fence": fence, "advisory": section.advisory})
        stack.callback(ready.remove)
        running = asyncio.create_task(controller.run(section.interval_s))
        leaving = asyncio.create_task(departure.wait())
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if running.done():
            running.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def proof_of(section: ControllerSection) -> Proof:
    """Return what proves this controller to the other processes; raises ConfigError for a secret that cannot be read."""
    secret = read_secret(section.secret_file) if section.secret_file else b""
    return Proof(secret, fresh_incarnation(), check_tls(section.tls))


def _probes(name: str, metrics: Metrics, departure: Departure) -> Probes:
    def well() -> str:
        return "" if not departure.has_begun else "the controller is leaving"

    return Probes(
        live=lambda: "",
        ready=well,
        started=lambda: "",
        metrics=metrics.render,
        status=lambda: {"id": name, "kind": "controller", "state": State.READY.value},
        drain=departure.begin_from_thread,
    )
