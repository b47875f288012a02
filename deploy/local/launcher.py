"""Starts, watches, scales and ends the processes of one local cluster.

The local actuator: `list`, `ensure(role, n)`, `remove(worker)`, `describe`. It ends only processes that it started,
by pid, and learns readiness from the files that they write. Runs on one event loop; knows no request and no page.
"""

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from core.clock import Clock
from core.config import native_environment, to_toml
from core.errors import ConfigError, DeadlineExceeded
from deploy.local.probe import answers_ok
from deploy.local.restart import after_exit
from deploy.local.slot import Slot, SlotState, first_sentence
from deploy.local.spec import (
    ClusterSpec,
    choose_leaving,
    controller_config,
    gateway_config,
    next_worker_id,
    overrides,
    threads_per_worker,
    worker_config,
)
from deploy.sweep import SHARED_MEMORY
from kv_transfer.memory import sweep_stale_segments

READY_POLL_S = 0.05
START_TIMEOUT_S = 180.0
GATEWAY_ID = "gateway-1"
CONTROLLER_ID = "controller-1"

Report = Callable[[str], None]


class Launcher:
    """The processes of one cluster. Construct, `start`, then `ensure`/`remove`/`down` at will."""

    def __init__(self, *, spec: ClusterSpec, run_dir: Path, model_dir: Path, clock: Clock, report: Report) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._model_dir = model_dir
        self._clock = clock
        self._report = report
        self._slots: dict[str, Slot] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._want = {"prefill": spec.prefill, "decode": spec.decode}
        self._closing = False

    # --- actuator -----------------------------------------------------------------------------------------------

    def list(self) -> list[str]:
        """Return the ids of all slots that hold or will hold a process."""
        return sorted(self._slots)

    def describe(self) -> dict[str, object]:
        """Return the cluster as `tandem status` shows it; notices restarted processes that have become ready."""
        for slot in self._slots.values():
            slot.poll_ready()
        gateway = self._slots.get(GATEWAY_ID)
        return {
            "name": self._spec.name,
            "model": self._spec.served_name or self._spec.model,
            "run_dir": str(self._run_dir),
            "http_address": gateway.facts.get("http_address") if gateway else None,
            "want": dict(self._want),
            "processes": [slot.describe() for slot in self._slots.values()],
        }

    async def ensure(self, role: str, count: int, report: Report | None = None) -> None:
        """Bring a pool to `count` workers: start missing ones, let the highest numbers drain and leave."""
        report = report or self._report
        self._check_pool(role)
        if count < (1 if role == "decode" else 0):
            raise ConfigError("at least one decode worker must stay; use `tandem down` to stop the cluster")
        if role == "prefill" and count == 0 and self._spec.prefill_mode == "remote":
            raise ConfigError("prefill_mode is remote, so at least one prefill worker must stay")
        self._want[role] = count
        present = [s.id for s in self._slots.values() if s.role == role and not s.asked]
        started = [await self._start_worker(role) for _ in range(count - len(present))]
        await asyncio.gather(*(self._wait_ready(slot, report) for slot in started))
        leaving = choose_leaving(role, present, len(present) - count)
        await asyncio.gather(*(self.remove(worker_id, report) for worker_id in leaving))

    async def order(self, role: str, count: int) -> None:
        """Start what a pool misses to have `count` workers that stay, without waiting for readiness; removes nobody."""
        self._check_pool(role)
        present = sum(1 for s in self._slots.values() if s.role == role and not s.asked)
        self._want[role] = max(present, count)
        for _ in range(count - present):
            await self._start_worker(role)

    def _check_pool(self, role: str) -> None:
        if role not in self._want:
            raise ConfigError(f"cannot scale {role!r}; the pools are prefill and decode")

    async def remove(self, worker_id: str, report: Report | None = None) -> None:
        """Drain one worker and wait until its process is gone (killed only past its budget)."""
        report = report or self._report
        slot = self._slots.get(worker_id)
        if slot is None:
            raise ConfigError(f"there is no process {worker_id!r}; running are {', '.join(self.list())}")
        if slot.role in self._want and not slot.asked:
            others = sum(1 for s in self._slots.values() if s.role == slot.role and not s.asked and s is not slot)
            self._want[slot.role] = min(self._want[slot.role], others)
        report(f"{worker_id}: draining")
        slot.terminate()
        if slot.pid is None:
            self._forget(slot)
        await self._wait_gone(slot, self._spec.drain_s + 5.0)
        report(f"{worker_id}: gone")

    # --- life of the cluster ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the gateway, then all workers at once; wait until every one is ready."""
        secret = self._run_dir / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        gateway = self._new_slot(GATEWAY_ID, "gateway")
        await self._launch(gateway)
        await self._wait_ready(gateway, self._report)
        slots = [await self._start_worker(role) for role, count in self._want.items() for _ in range(count)]
        await asyncio.gather(*(self._wait_ready(slot, self._report) for slot in slots))
        if self._spec.autoscale:
            controller = self._new_slot(CONTROLLER_ID, "controller")
            await self._launch(controller)
            await self._wait_ready(controller, self._report)

    async def down(self, budget_s: float) -> None:
        """End everything: workers drain beside the gateway's open streams, then the gateway leaves."""
        self._closing = True
        controller = [s for s in self._slots.values() if s.role == "controller"]
        gateway = [s for s in self._slots.values() if s.role == "gateway"]
        workers = [s for s in self._slots.values() if s.role in self._want]
        for group in (controller, gateway, workers):
            for slot in group:
                slot.terminate()
            await asyncio.gather(*(self._wait_gone(slot, budget_s) for slot in group))
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for slot in list(self._slots.values()):
            self._forget(slot)
        sweep_stale_segments(str(SHARED_MEMORY))

    # --- processes ----------------------------------------------------------------------------------------------

    def _new_slot(self, slot_id: str, role: str) -> Slot:
        slot = Slot(slot_id=slot_id, role=role, run_dir=self._run_dir, clock=self._clock)
        self._slots[slot_id] = slot
        return slot

    async def _start_worker(self, role: str) -> Slot:
        slot = self._new_slot(next_worker_id(role, set(self._slots)), role)
        await self._launch(slot)
        return slot

    async def _launch(self, slot: Slot) -> None:
        threads = threads_per_worker(os.cpu_count() or 1, sum(self._want.values()))
        config = self._config_of(slot, threads)
        await slot.start(to_toml(config), overrides(self._spec, slot.role), native_environment(threads=threads))
        watcher = asyncio.create_task(self._watch(slot))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    def _config_of(self, slot: Slot, threads: int) -> dict[str, object]:
        if slot.role == "gateway":
            return gateway_config(
                self._spec,
                gateway_id=slot.id,
                run_dir=self._run_dir,
                model_dir=self._model_dir,
                http_port=self._port_of(slot, "http_address", self._spec.port),
                membership_port=self._port_of(slot, "membership_address", 0),
            )
        gateways = [str(self._slots[GATEWAY_ID].facts["membership_address"])]
        if slot.role == "controller":
            return controller_config(self._spec, controller_id=slot.id, run_dir=self._run_dir, gateways=gateways)
        return worker_config(
            self._spec,
            role=slot.role,
            worker_id=slot.id,
            run_dir=self._run_dir,
            model_dir=self._model_dir,
            gateways=gateways,
            threads=threads,
        )

    def _port_of(self, slot: Slot, fact: str, default: int) -> int:
        """Keep the port of an earlier life: workers and clients know it."""
        address = str(slot.facts.get(fact, ""))
        return int(address.rsplit(":", 1)[1]) if ":" in address else default

    async def _wait_ready(self, slot: Slot, report: Report) -> None:
        deadline = self._clock.now() + START_TIMEOUT_S
        while not (slot.poll_ready() and await self._is_registered(slot)):
            if slot.state in {SlotState.HELD, SlotState.GONE, SlotState.BACKOFF}:
                tail = slot.log_tail()
                raise ConfigError(f"{slot.id} did not start: {first_sentence(tail)} (log: {slot.log_path})")
            if self._clock.now() > deadline:
                raise DeadlineExceeded(f"{slot.id} was not ready after {START_TIMEOUT_S:.0f} s (log: {slot.log_path})")
            await asyncio.sleep(READY_POLL_S)
        report(f"{slot.id}: ready after {self._clock.now() - slot.started_at:.1f} s")

    async def _is_registered(self, slot: Slot) -> bool:
        """True once a worker also holds a gateway's lease: before that no request can reach it."""
        return slot.role == "gateway" or await asyncio.to_thread(answers_ok, str(slot.facts["http_address"]), "/readyz")

    async def _wait_gone(self, slot: Slot, budget_s: float) -> None:
        if slot.process is None:
            return
        try:
            await asyncio.wait_for(slot.process.wait(), budget_s)
        except TimeoutError:
            self._report(f"{slot.id}: did not leave within {budget_s:.0f} s, killed")
            slot.kill()
            await slot.process.wait()
        while self._slots.get(slot.id) is slot and slot.state is not SlotState.GONE and not self._closing:
            await asyncio.sleep(READY_POLL_S)

    async def _watch(self, slot: Slot) -> None:
        """Wait for the end of one process, then restart, hold or forget its slot."""
        assert slot.process is not None
        code = await slot.process.wait()
        verdict = after_exit(
            slot.history,
            exit_code=code,
            was_asked=slot.asked or self._closing,
            started_at=slot.started_at,
            now=self._clock.now(),
        )
        slot.history, slot.reason = verdict.history, verdict.reason
        if code != 0:
            sweep_stale_segments(str(SHARED_MEMORY))
        if verdict.action == "remove":
            self._forget(slot)
        elif verdict.action == "hold":
            slot.state = SlotState.HELD
            self._report(f"{slot.id}: held, {verdict.reason}: {first_sentence(slot.log_tail())} (log: {slot.log_path})")
        else:
            slot.state = SlotState.BACKOFF
            self._report(f"{slot.id}: {verdict.reason}, starting again in {verdict.delay_s:.0f} s")
            await asyncio.sleep(verdict.delay_s)
            if not self._closing and self._slots.get(slot.id) is slot and not slot.asked:
                await self._launch(slot)

    def _forget(self, slot: Slot) -> None:
        slot.state = SlotState.GONE
        slot.forget()
        self._slots.pop(slot.id, None)
