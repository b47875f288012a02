"""The launcher of a cluster on Ray: as on one machine, with hosts that can vanish and a controller that can.

What is inherited decides (sizes, order, back-off, rollouts); what is here finds out. A worker whose host is lost gets a
new name, because the old process may still run; a restarted controller adopts the supervisors that it finds.
"""

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from core.clock import Clock
from core.errors import ConfigError, WorkerLost
from deploy.local.launcher import GATEWAY_IDS, Launcher
from deploy.local.slot import Slot
from deploy.local.spec import Revision, next_worker_id
from deploy.ray.api import RayPort
from deploy.ray.plan import GATEWAY, Needs, RayPlan, Saved, check_domains, choose_domain, decode_saved, encode_saved
from deploy.ray.process import RemoteProcess
from deploy.ray.slot import RaySlot

_LOG = logging.getLogger(__name__)
SAVE_POLL_S = 0.2
DOMAINS_POLL_S = 5.0
ADOPT_TIMEOUT_S = 10.0
GRACE_S = 5.0


class RayLauncher(Launcher):
    """The processes of one cluster on Ray. `begin` first; the rest as `Launcher`."""

    def __init__(
        self, *, plan: RayPlan, port: RayPort, run_dir: Path, clock: Clock, report: Callable[[str], None]
    ) -> None:
        # The controller is this very actor, not a process to start.
        spec = msgspec.structs.replace(plan.spec, autoscale=False)
        super().__init__(spec=spec, run_dir=run_dir, model_dir=Path(plan.spec.model), clock=clock, report=report)
        self.epoch = 1
        self.secret = secrets.token_hex(32)
        self._plan = plan
        self._port = port
        self._hosts: list[str] = []
        self._taken: set[str] = set()
        """Names of lost supervisors, whose processes may still run."""
        self._waiting: set[asyncio.Task[None]] = set()
        self._saved = b""

    async def begin(self) -> None:
        """Start the cluster, or take over the one whose controller this one replaces; returns when it serves in full."""
        found = await self._port.load()
        if found is None:
            check_domains(await self._port.domains(), self._plan.slices)
            host, first = await self._port.gateway_host(), self._plan.membership_port
            self._hosts = [f"{host}:{first}", f"{host}:{first + 1}"]
            await self._save()
            self._spawn(self._keep())
            self._spawn(self._leave_lost_domains())
            await self.start()
        else:
            self._spawn(self._leave_lost_domains())
            await self._recover(decode_saved(found))

    async def down(self, budget_s: float) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        slots = list(self._slots.values())
        await super().down(budget_s)
        for slot in slots:
            if isinstance(slot, RaySlot) and slot.remote is not None:
                slot.remote.close()
        for name in await self._port.names():
            await self._port.end(name)
        await self._port.sweep(())
        await self._port.save(None)

    @property
    def gateways(self) -> list[str]:
        """Membership addresses of both places of a gateway."""
        return list(self._membership.values())

    async def start_worker(self, role: str, revision: Revision) -> Slot:
        return await self._start(next_worker_id(role, set(self._slots) | self._taken), role, revision)

    async def start_gateway(self, revision: Revision) -> Slot:
        free = [name for name in GATEWAY_IDS if name not in self._slots and name not in self._taken]
        if not free:
            raise ConfigError("both places of a gateway are taken; the lost one is free once Ray reports its end")
        return await self._start(free[0], "gateway", revision)

    # --- what the launcher asks of its place --------------------------------------------------------------------

    def _prepare(self) -> list[str]:
        return self._hosts

    def _threads(self, role: str) -> int:
        return max(1, int(self._needs(role).cpus))

    def _needs(self, role: str) -> Needs:
        return self._plan.needs.get(role, Needs())

    def _make_slot(self, slot_id: str, role: str, revision: Revision) -> Slot:
        return RaySlot(
            slot_id=slot_id,
            role=role,
            revision=revision,
            run_dir=self._run_dir,
            clock=self._clock,
            port=self._port,
            needs=self._needs(role),
            secret=self.secret,
        )

    async def _place(self, slot: Slot) -> None:
        """Give a worker that starts a domain, unless the one it had is still there."""
        assert isinstance(slot, RaySlot), "only such slots are made here"
        if slot.role == GATEWAY or self._plan.slices == 1:
            return
        live = await self._port.domains()
        if slot.domain not in live:
            others = [
                s for s in self._slots.values() if isinstance(s, RaySlot) and s.role == slot.role and s is not slot
            ]
            slot.domain = choose_domain(live, [s.domain for s in others], self._plan.slices)

    async def _leave_lost_domains(self) -> None:
        """Let workers go elsewhere that wait for a host in a domain that is gone: Ray would keep them waiting. Until cancelled.

        Ray takes about a minute to notice a host that is cut off, so a worker may be ordered to where no host is any more.
        """
        while self._plan.slices > 1:
            await asyncio.sleep(DOMAINS_POLL_S)
            live = await self._port.domains()
            for slot in [s for s in self._slots.values() if isinstance(s, RaySlot)]:
                if (
                    slot.domain
                    and slot.domain not in live
                    and not slot.asked
                    and slot.remote
                    and slot.remote.is_waiting
                ):
                    self._report(f"{slot.id}: no host of domain {slot.domain} is left")
                    slot.remote.send_signal(signal.SIGTERM)

    async def _launch(self, slot: Slot) -> None:
        if not self._is_lost(slot):
            await self._place(slot)
            await super()._launch(slot)
            return
        self._slots.pop(slot.id, None)
        self._hold_name(slot)
        start = (
            self.start_gateway(slot.revision) if slot.role == GATEWAY else self.start_worker(slot.role, slot.revision)
        )
        fresh = await start
        fresh.history = slot.history
        self._report(f"{slot.id}: lost with its supervisor, {fresh.id} takes its place")

    def _forget(self, slot: Slot) -> None:
        super()._forget(slot)
        if self._is_lost(slot):
            self._hold_name(slot)

    @staticmethod
    def _is_lost(slot: Slot) -> bool:
        return isinstance(slot, RaySlot) and slot.remote is not None and slot.remote.is_lost

    def _hold_name(self, slot: Slot) -> None:
        assert isinstance(slot, RaySlot), "only such slots are made here"
        self._taken.add(slot.id)
        self._spawn(self._free_name(slot.id, slot.remote))

    async def _free_name(self, name: str, remote: RemoteProcess | None) -> None:
        """Give a lost name back once its process cannot run any more."""
        if remote is None or not await remote.freed():
            # Its supervisor is dead; the process got SIGTERM from the kernel and may use its whole budget.
            await asyncio.sleep(self.revision.spec.drain_s + GRACE_S)
        await self._port.end(name)
        self._taken.discard(name)

    # --- a controller that replaces another ---------------------------------------------------------------------

    async def _recover(self, saved: Saved) -> None:
        self.epoch, self.secret, self.revision = saved.epoch + 1, saved.secret, saved.the_revision()
        self._want, self._hosts, self._http_port = dict(saved.want), list(saved.membership), saved.http_port
        self._membership = dict(zip(GATEWAY_IDS, self._hosts, strict=True))
        await self._save()
        names = await self._port.names()
        revisions = {self.revision.number: self.revision}
        await asyncio.gather(*(self._adopt(name, revisions) for name in names))
        for name in {*names, *saved.names} - set(self._slots):
            self._taken.add(name)
            self._spawn(self._free_name(name, None))
        for name in await self._port.sweep(list(self._slots)):
            _LOG.warning("placement group %s was left by an earlier controller and is removed", name)
        self._spawn(self._keep())
        self._report(f"controller {self.epoch}: adopted {', '.join(self.ids()) or 'nothing'}")
        for role, count in (("gateway", 1), *self._want.items()):
            present = sum(slot.revision is self.revision for slot in self.slots(role))
            for _ in range(count - present):
                await (self.start_gateway(self.revision) if role == GATEWAY else self.start_worker(role, self.revision))
        base = [slot for slot in self._slots.values() if slot.revision is self.revision and not slot.asked]
        await asyncio.gather(*(self.wait_ready(slot, self._report) for slot in base))
        # A rollout that its controller did not survive is one that goes back.
        others = [s.id for s in self._slots.values() if s.revision is not self.revision and not s.asked]
        await asyncio.gather(*(self.remove(slot_id) for slot_id in others))

    async def _adopt(self, name: str, revisions: dict[int, Revision]) -> None:
        supervisor = await self._port.find(name)
        if supervisor is None:
            return
        try:
            async with asyncio.timeout(ADOPT_TIMEOUT_S):
                told = await supervisor.told()
        except (TimeoutError, WorkerLost):
            told = None
        if told is None or told.order is None:
            return  # silent, or created but never told what to start
        revision = revisions.setdefault(told.order.revision.number, told.order.revision)
        slot = self._make_slot(name, told.order.role, revision)
        assert isinstance(slot, RaySlot), "only such slots are made here"
        self._slots[name] = slot
        slot.adopt(supervisor, told)
        self._follow(slot)

    # --- what is kept --------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Save what has changed, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_POLL_S)
            await self._save()

    async def _save(self) -> None:
        data = encode_saved(
            Saved(
                epoch=self.epoch,
                revision=self.revision.number,
                spec=self.revision.spec,
                model=str(self.revision.model_dir),
                want=self._want,
                secret=self.secret,
                membership=self._hosts,
                http_port=self._http_port,
                names=sorted({*self._slots, *self._taken}),
            )
        )
        if data != self._saved:
            await self._port.save(data)
            self._saved = data

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
