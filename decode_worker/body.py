"""What the worker shell asks of a decode worker: load, statistics, snapshot, and how it leaves. Asyncio thread."""

import msgspec

from core.ids import Incarnation
from core.rpc.admin import Statistics
from core.worker import KvSnapshot, Load
from decode_worker.service import DecodeService
from engine.engine_thread import EngineThread
from kv_transfer.destination import Destination


class DecodeBody:
    """Implements `core.worker_shell.WorkerBody` over engine, service and transfer."""

    def __init__(
        self, *, incarnation: Incarnation, engine: EngineThread, service: DecodeService, destination: Destination
    ) -> None:
        self._incarnation = incarnation
        self._engine = engine
        self._service = service
        self._destination = destination

    async def load(self) -> Load:
        """Return the engine's load with the transfer's open operations."""
        load = await self._engine.call(lambda engine: engine.load())
        open_ops = int(self._destination.statistics().get("open_ops", 0))
        return msgspec.structs.replace(load, open_ops=open_ops)

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
