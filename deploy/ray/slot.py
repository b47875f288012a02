"""The place of one process on a Ray cluster: a supervisor actor named like the process runs it on some host."""

from collections.abc import Awaitable
from pathlib import Path

from core.clock import Clock
from deploy.local.slot import Slot, SlotState
from deploy.local.spec import Revision
from deploy.ray.api import Order, RayPort, Supervisor, Told
from deploy.ray.plan import Needs
from deploy.ray.process import RemoteProcess


class RaySlot(Slot):
    """As the launcher's own slot, with the process elsewhere. `domain` is the network domain that it is ordered for; empty: any."""

    def __init__(
        self,
        *,
        slot_id: str,
        role: str,
        revision: Revision,
        run_dir: Path,
        clock: Clock,
        port: RayPort,
        needs: Needs,
        secret: str,
    ) -> None:
        super().__init__(slot_id=slot_id, role=role, revision=revision, run_dir=run_dir, clock=clock)
        self.domain = ""
        self.remote: RemoteProcess | None = None
        self._port = port
        self._needs = needs
        self._secret = secret

    async def start(self, config_toml: str, sets: list[str], threads: int) -> None:
        order = Order(
            slot_id=self.id,
            role=self.role,
            revision=self.revision,
            config_toml=config_toml,
            sets=tuple(sets),
            threads=threads,
            domain=self.domain,
            secret=self._secret,
        )
        self._take(self._port.create(self.id, self.role, self._needs, self.domain), order)
        self.asked = False

    def adopt(self, supervisor: Supervisor, told: Told) -> None:
        """Follow a process that an earlier controller started."""
        self.domain = told.order.domain if told.order is not None else ""

        async def found() -> Supervisor:
            return supervisor

        self._take(found(), None)
        self.asked = told.is_asked
        if self.asked:
            self.state = SlotState.LEAVING

    def _take(self, supervisor: Awaitable[Supervisor], order: Order | None) -> None:
        self.process = self.remote = RemoteProcess(supervisor, order, lambda: self._port.end(self.id))
        self.started_at = self._clock.now()
        self.state = SlotState.STARTING

    def poll_ready(self) -> bool:
        if self.state is SlotState.STARTING and self.remote is not None and self.remote.facts:
            self.facts = self.remote.facts
            self.state = SlotState.READY
        return self.state is SlotState.READY

    def forget(self) -> None:
        """Nothing of it lies on this host."""

    def log_tail(self, lines: int = 50) -> str:
        return "\n".join(self.remote.log_tail.splitlines()[-lines:]) if self.remote is not None else ""

    def describe(self) -> dict[str, object]:
        log = self.remote.log if self.remote is not None else ""
        return {**super().describe(), "log": log, "domain": self.domain}
