"""What the worker shell asks of a prefill worker: load, statistics, snapshot, and how it leaves. Asyncio thread."""

import asyncio

import msgspec

from core.ids import Incarnation
from core.rpc.admin import Statistics
from core.worker import KvSnapshot, Load
from engine.engine_thread import EngineThread
from kv_transfer.source import Source
from prefill_worker.service import PrefillService

_LEASE_POLL_S = 0.05


class PrefillBody:
    """Implements `core.worker_shell.WorkerBody` over engine, service and transfer."""

    def __init__(
        self, *, incarnation: Incarnation, engine: EngineThread, service: PrefillService, source: Source
    ) -> None:
        self._incarnation = incarnation
        self._engine = engine
        self._service = service
        self._source = source

    async def load(self) -> Load:
        """Return the engine's load with the leases that live."""
        load = await self._engine.call(lambda engine: engine.load())
        return msgspec.structs.replace(load, leases=self._source.num_leases)

    async def statistics(self, audit: bool) -> Statistics:
        """Return the numbers of all parts, each with its part's name in front."""
        values, findings = await self._engine.statistics(
            audit, transfer=self._source.statistics(), worker=self._service.statistics()
        )
        return Statistics(values=values, audit_findings=findings)

    async def snapshot(self) -> KvSnapshot:
        """Return the pages of the prefix tree."""
        return await self._engine.call(lambda engine: engine.kv_snapshot(self._incarnation))

    def heartbeat_age_s(self) -> float:
        """Age of the engine's last pass. Any thread."""
        return self._engine.heartbeat_age_s()

    def begin_drain(self) -> None:
        """Refuse new hand-overs; those that live go on until taken or expired."""
        self._source.drain()

    async def finished(self) -> None:
        """Wait until every lease was released or has expired."""
        while self._source.num_leases:  # noqa: ASYNC110 - the transfer layer counts leases and tells no end
            await asyncio.sleep(_LEASE_POLL_S)

    async def hand_back(self) -> None:
        """Nothing to do: destinations whose lease ends ask their gateways for another prefill worker."""
