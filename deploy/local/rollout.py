"""Replaces the processes of a local cluster by those of another revision while it serves.

Workers first, in the steps of `deploy.rollout_plan`; then the gateway, by one that shares its HTTP port. Capacity never
falls below the pools' sizes. Whatever fails before the old gateway is told to leave, or an abort, brings the old
revision back in the same order: first it serves again in full, then the new one leaves.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from core.errors import ConfigError, DeadlineExceeded, TandemError
from deploy.local.launcher import Launcher, check_one_fingerprint
from deploy.local.probe import routable
from deploy.local.slot import Slot
from deploy.local.spec import Revision, changed_roles, choose_leaving
from deploy.rollout_plan import rollout_steps

POLL_S = 0.1
JOIN_TIMEOUT_S = 60.0
"""Workers look for a gateway that was away every two seconds at least."""

Report = Callable[[str], None]


class Rollout:
    """One rollout. `run` once; `abort` while it runs."""

    def __init__(self, launcher: Launcher, target: Revision, *, surge: int, report: Report) -> None:
        self._launcher = launcher
        self._old = launcher.revision
        self._new = target
        self._surge = surge
        self._report = report
        self._roles = changed_roles(self._old, target)
        self._want = {role: count for role, count in launcher.want.items() if role in self._roles}
        self._is_past = False
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return when the new revision serves alone; raises ConfigError with the reason when the old one does again."""
        self._work = asyncio.create_task(self._forward())
        try:
            await asyncio.shield(self._work)
        except asyncio.CancelledError:
            if not self._work.done():  # it is we who are cancelled: the cluster ends
                self._work.cancel()
                raise
            await self._back("aborted")
        except TandemError as error:
            if self._is_past:
                raise
            await self._back(error.message)

    def abort(self) -> None:
        """Go back; raises ConfigError if the old gateway is leaving already."""
        if self._is_past:
            raise ConfigError("the old gateway is leaving, so this rollout is over; roll out the old settings instead")
        if self._work is not None:
            self._work.cancel()

    async def _forward(self) -> None:
        launcher = self._launcher
        for step in rollout_steps(self._want, self._surge):
            for role, count in step.new.items():
                for _ in range(count - len(self._slots(role, self._new))):
                    await launcher.start_worker(role, self._new)
            fresh = [slot for role in self._want for slot in self._slots(role, self._new)]
            await asyncio.gather(*(launcher.wait_ready(slot, self._report) for slot in fresh))
            kept = [slot for role in launcher.want if role not in self._roles for slot in launcher.slots(role)]
            check_one_fingerprint([*fresh, *kept])
            await self._leave(self._old, step.old)
        if "gateway" in self._roles:
            await self._replace_gateway()
        self._is_past = True
        launcher.revision = self._new
        if "controller" in self._roles and launcher.slots("controller"):
            for slot in launcher.slots("controller"):
                await launcher.remove(slot.id, self._report)
            await launcher.wait_ready(await launcher.start_controller(self._new), self._report)

    async def _replace_gateway(self) -> None:
        launcher = self._launcher
        [old] = launcher.slots("gateway")
        fresh = await launcher.start_gateway(self._new)
        await launcher.wait_ready(fresh, self._report)
        expected = {slot.id for role in launcher.want for slot in launcher.slots(role)}
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                while not expected <= await asyncio.to_thread(routable, str(fresh.facts["listener_address"])):
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{fresh.id} did not hear of all workers (log: {fresh.log_path})") from error
        self._is_past = True
        await launcher.remove(old.id, self._report)

    async def _back(self, reason: str) -> None:
        launcher = self._launcher
        self._report(f"going back to revision {self._old.number}: {reason}")
        again = [
            await launcher.start_worker(role, self._old)
            for role, count in self._want.items()
            for _ in range(count - len(self._slots(role, self._old)))
        ]
        await asyncio.gather(*(launcher.wait_ready(slot, self._report) for slot in again))
        await self._leave(self._new, dict.fromkeys((*self._want, "gateway"), 0))
        raise ConfigError(f"the rollout went back to revision {self._old.number}: {reason}")

    async def _leave(self, revision: Revision, counts: Mapping[str, int]) -> None:
        leaving: list[str] = []
        for role, count in counts.items():
            ids = [slot.id for slot in self._slots(role, revision)]
            leaving += choose_leaving(role, ids, len(ids) - count)
        await asyncio.gather(*(self._launcher.remove(slot_id, self._report) for slot_id in leaving))

    def _slots(self, role: str, revision: Revision) -> list[Slot]:
        return [slot for slot in self._launcher.slots(role) if slot.revision is revision]


def check_tokenizer(old: Path, new: Path) -> None:
    """Raise ConfigError if two model directories have different tokenizers.

    While both revisions serve, one gateway makes the token ids for both: they would mean something else to the other one.
    """
    files = [directory / "tokenizer.json" for directory in (old, new)]
    if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
        raise ConfigError(
            f"{new} has another tokenizer than {old}, and a gateway speaks one at a time; "
            "start a cluster of the new model beside this one (tandem up --name) and move the clients"
        )
