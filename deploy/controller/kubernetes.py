"""The controller in a pod: waits for the Lease, then runs as everywhere, and ends as soon as the Lease is another's."""

import asyncio
import contextlib

from core.clock import SystemClock
from core.process import Departure
from deploy.actuators.factory import actuator_for
from deploy.actuators.kubernetes_api import HttpKubernetesApi
from deploy.controller.app import control
from deploy.controller.config import ControllerConfig
from deploy.controller.lease import LeaseLock


async def serve(config: ControllerConfig, departure: Departure) -> None:
    """Run until told to leave, or until another controller takes over; one that only advises needs no Lease."""
    section = config.controller
    actuator = actuator_for(section.place, section.target)
    if section.advisory:
        await control(config, departure, actuator, 0)
        return
    lock = LeaseLock(HttpKubernetesApi(section.target), SystemClock(), section.id)
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
