"""What the worker shell asks of a decode worker: load, statistics, snapshot, and how it leaves. Asyncio thread."""

import msgspec

from core.ids import Incarnation
from core.rpc.admin import Statistics
from core.worker import KvSnapshot, Load
from decode_worker.service import DecodeService
from engine.engine_thread import EngineThread
from kv_transfer.destination import Destination

LEAST_READING_S = 0.05
"""A rate is told over at least so much time in which KV was asked for: less would be the noise of one read."""


class DecodeBody:
    """Implements `core.worker_shell.WorkerBody` over engine, service and transfer."""

    def __init__(
        self, *, incarnation: Incarnation, engine: EngineThread, service: DecodeService, destination: Destination
    ) -> None:
        self._incarnation = incarnation
        self._engine = engine
        self._service = service
        self._destination = destination
        self._seen = (0.0, 0.0)
        self._kv_bytes_per_s = 0.0

    async def load(self) -> Load:
        """Return the engine's load with the transfer's open operations and what waits for the link."""
        load = await self._engine.call(lambda engine: engine.load())
        told = self._destination.statistics()
        landed, reading_s = told.get("landed_bytes", 0.0), told.get("reading_s", 0.0)
        if reading_s - self._seen[1] > LEAST_READING_S:
            self._kv_bytes_per_s = max(0.0, landed - self._seen[0]) / (reading_s - self._seen[1])
            self._seen = (landed, reading_s)
        return msgspec.structs.replace(
            load,
            open_ops=int(told.get("open_ops", 0)),
            kv_backlog_bytes=int(told.get("backlog_bytes", 0)),
            kv_bytes_per_s=self._kv_bytes_per_s,
        )

    async def statistics(self, audit: bool) -> Statistics:
        """Return the numbers of all parts, each with its part's name in front."""
        values, findings = await self._engine.statistics(
            audit, transfer=self._destination.statistics(), worker=self._service.statistics()
        )
        return Statistics(values=values, audit_findings=findings)

    async def snapshot(self) -> KvSnapshot:
        """Return the pages of the prefix tree."""
        return await self._engine.call(lambda engine: engine.kv_snapshot(self._incarnation))

    def heartbeat_age_s(self) -> float:
        """Age of the engine's last pass. Any thread."""
        return self._engine.heartbeat_age_s()

    def begin_drain(self) -> None:
        """Refuse new requests."""
        self._service.begin_drain()

    async def finished(self) -> None:
        """Wait for the last request."""
        await self._service.finished()

    async def hand_back(self) -> None:
        """Give what is left back to the gateways."""
        await self._service.hand_back()
