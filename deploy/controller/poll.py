"""Asks every gateway for its figures over the admin service. Asyncio.

A gateway that does not answer keeps its last figures and makes them older; one that was silent for a minute while
others answer is taken for gone.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from core.clock import Clock
from core.errors import TandemError
from core.rpc.addresses import expand
from core.rpc.admin import AdminClient
from deploy.controller.figures import GatewayFigures

_LOG = logging.getLogger(__name__)
FORGET_S = 60.0
NEVER_S = 1e9
"""Age of figures that were never read; a number that JSON can hold."""
TIMEOUT_S = 3.0


class FigureSource(Protocol):
    """Where the controller's figures come from."""

    async def read(self) -> tuple[Sequence[GatewayFigures], float]:
        """Return the figures of all gateways and the age of the oldest in seconds (`NEVER_S`: none was ever read)."""
        ...


class GatewayPoll:
    """`FigureSource` over the admin service of gateways at fixed addresses, or behind a name (`dns:`)."""

    def __init__(self, client: AdminClient, addresses: Sequence[str], clock: Clock) -> None:
        self._client = client
        self._addresses = addresses
        self._clock = clock
        self._last: dict[str, tuple[float, GatewayFigures]] = {}
        self._silent: dict[str, str] = {}

    async def read(self) -> tuple[Sequence[GatewayFigures], float]:
        await asyncio.gather(*(self._ask(address) for address in await expand(self._addresses)))
        now = self._clock.now()
        if any(now - at < FORGET_S for at, _ in self._last.values()):
            self._last = {a: entry for a, entry in self._last.items() if now - entry[0] < FORGET_S}
        age_s = max((now - at for at, _ in self._last.values()), default=NEVER_S)
        return [figures for _, figures in self._last.values()], age_s

    async def _ask(self, address: str) -> None:
        try:
            told = await self._client.describe(address, TIMEOUT_S)
            statistics = await self._client.statistics(address, timeout_s=TIMEOUT_S)
        except TandemError as error:
            if self._silent.get(address) != error.message:  # one line for a place that stays empty, not one a tick
                self._silent[address] = error.message
                _LOG.warning("gateway %s does not answer: %s", address, error.message)
            return
        self._silent.pop(address, None)
        figures = GatewayFigures(incarnation=told.incarnation, values=statistics.values)
        self._last[address] = (self._clock.now(), figures)
