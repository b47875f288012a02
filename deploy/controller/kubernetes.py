"""The controller in a pod: waits for the Lease, then runs as everywhere, and ends as soon as the Lease is another's."""

import asyncio
import contextlib

from core.clock import SystemClock
from core.process import Departure
from core.rpc.admin import AdminClient
from deploy.actuators.factory import REMOVE_TIMEOUT_S
from deploy.actuators.kubernetes import KubernetesActuator, drain_budget_s, worker_address
from deploy.actuators.kubernetes_api import Body, HttpKubernetesApi
from deploy.controller.app import control, proof_of
from deploy.controller.config import ControllerConfig
from deploy.controller.lease import LeaseLock


async def serve(config: ControllerConfig, departure: Departure) -> None:
    """Run until told to leave, or until another controller takes over; one that only advises needs no Lease."""
    section = config.controller
    api, client = HttpKubernetesApi(section.target), AdminClient(proof_of(section))

    async def drain(pod: Body) -> None:
        await client.drain(worker_address(pod), drain_budget_s(pod))

    actuator = KubernetesActuator(
        api, SystemClock(), namespace=section.target, remove_timeout_s=REMOVE_TIMEOUT_S, drain=drain
    )
    if section.advisory:
        await control(config, departure, actuator, 0)
        return
    lock = LeaseLock(api, SystemClock(), section.id)
    waiting, leaving = asyncio.create_task(lock.acquire()), asyncio.create_task(departure.wait())
    await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not waiting.done():
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return
    fence = waiting.result()
    renewing = asyncio.create_task(_keep(lock, departure))
    try:
        await control(config, departure, actuator, fence)
    finally:
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewing
        await lock.release()


async def _keep(lock: LeaseLock, departure: Departure) -> None:
    try:
        await lock.renew()
    except Exception as error:  # noqa: BLE001 - whatever it is, this process may not give orders any more
        departure.crash(error)
