"""Starts, watches, scales and ends the processes of one local cluster.

It ends only processes that it started, by pid, and learns readiness from the files that they write. Runs on one event
loop; knows no request and no page.
"""

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from core.clock import Clock
from core.config import to_toml
from core.errors import ConfigError, DeadlineExceeded
from deploy.local.probe import answers_ok
from deploy.local.restart import after_exit
from deploy.local.slot import Slot, SlotState, first_sentence
from deploy.local.spec import (
    ClusterSpec,
    Revision,
    choose_leaving,
    next_worker_id,
    overrides,
    process_config,
    threads_per_worker,
)
from deploy.sweep import SHARED_MEMORY
from gateway.http.server import bind
from kv_transfer.memory import sweep_stale_segments

READY_POLL_S = 0.05
BACKLOG = 2048
START_TIMEOUT_S = 600.0
"""Loading, recording steps, and compiling every kernel if nothing is cached: a process that ends instead is seen at once."""
GATEWAY_IDS = ("gateway-1", "gateway-2")
"""One serves; the other replaces it in a rollout, on the same HTTP port and the other of two membership ports."""
CONTROLLER_ID = "controller-1"
MEMBERSHIP_PORTS = range(20_000, 30_000)
"""Below those of outgoing connections, which may take any port between its choice and its gateway's start."""

Report = Callable[[str], None]


class Launcher:
    """The processes of one cluster. Construct, `start`, then `ensure`/`remove`/`down` at will."""

    def __init__(self, *, spec: ClusterSpec, run_dir: Path, model_dir: Path, clock: Clock, report: Report) -> None:
        self.revision = Revision(number=1, spec=spec, model_dir=model_dir)
        """Of the processes that are started from now on; a rollout sets the next one at its end."""
        self._run_dir = run_dir
        self._clock = clock
        self._report = report
        self._slots: dict[str, Slot] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._want = {"prefill": spec.prefill, "decode": spec.decode}
        self._http_port = spec.port
        self._listener: socket.socket | None = None
        """Where clients connect: all gateways inherit it, so that none of them owns the queue of connections."""
        self._membership: dict[str, str] = {}
        self._closing = False

    # --- actuator -----------------------------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """Return the ids of all slots that hold or will hold a process."""
        return sorted(self._slots)

    def describe(self) -> dict[str, object]:
        """Return the cluster as `tandem status` shows it; notices restarted processes that have become ready."""
        for slot in self._slots.values():
            slot.poll_ready()
        spec = self.revision.spec
        return {
            "name": spec.name,
            "model": spec.served_name or spec.model,
            "revision": self.revision.number,
            "run_dir": str(self._run_dir),
            "http_address": f"{spec.host}:{self._http_port}" if self._http_port else None,
            "want": dict(self._want),
            "processes": [slot.describe() for slot in self._slots.values()],
        }

    def slots(self, role: str) -> list[Slot]:
        """Return the places of a role whose processes stay, oldest first."""
        return [slot for slot in self._slots.values() if slot.role == role and not slot.asked]

    @property
    def want(self) -> dict[str, int]:
        """Sizes of both pools, by role."""
        return dict(self._want)

    async def ensure(self, role: str, count: int, report: Report | None = None) -> None:
        """Bring a pool to `count` workers: start missing ones, let the highest numbers drain and leave."""
        report = report or self._report
        self._check_pool(role)
        if count < (1 if role == "decode" else 0):
            raise ConfigError("at least one decode worker must stay; use `tandem down` to stop the cluster")
        if role == "prefill" and count == 0 and self.revision.spec.prefill_mode == "remote":
            raise ConfigError("prefill_mode is remote, so at least one prefill worker must stay")
        self._want[role] = count
        present = [slot.id for slot in self.slots(role)]
        started = [await self.start_worker(role, self.revision) for _ in range(count - len(present))]
        await asyncio.gather(*(self.wait_ready(slot, report) for slot in started))
        leaving = choose_leaving(role, present, len(present) - count)
        await asyncio.gather(*(self.remove(worker_id, report) for worker_id in leaving))

    async def order(self, role: str, count: int) -> None:
        """Start what a pool misses to have `count` workers that stay, without waiting for readiness; removes nobody."""
        self._check_pool(role)
        present = len(self.slots(role))
        self._want[role] = max(present, count)
        for _ in range(count - present):
            await self.start_worker(role, self.revision)

    def _check_pool(self, role: str) -> None:
        if role not in self._want:
            raise ConfigError(f"cannot scale {role!r}; the pools are prefill and decode")

    async def remove(self, worker_id: str, report: Report | None = None) -> None:
        """Drain one worker and wait until its process is gone (killed only past its budget)."""
        report = report or self._report
        slot = self._slots.get(worker_id)
        if slot is None:
            raise ConfigError(f"there is no process {worker_id!r}; running are {', '.join(self.ids())}")
        if slot.role in self._want and not slot.asked:
            self._want[slot.role] = min(self._want[slot.role], len(self.slots(slot.role)) - 1)
        report(f"{worker_id}: draining")
        slot.terminate()
        if slot.pid is None:
            self._forget(slot)
        await self._wait_gone(slot, slot.revision.spec.drain_s + 5.0)
        report(f"{worker_id}: gone")

    # --- life of the cluster ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the gateway, then all workers at once; wait until every one is ready."""
        self._membership = dict(zip(GATEWAY_IDS, self._prepare(), strict=True))
        gateway = await self.start_gateway(self.revision)
        await self.wait_ready(gateway, self._report)
        slots = [await self.start_worker(role, self.revision) for role, n in self._want.items() for _ in range(n)]
        await asyncio.gather(*(self.wait_ready(slot, self._report) for slot in slots))
        check_one_fingerprint(slots)
        if self.revision.spec.autoscale:
            await self.wait_ready(await self.start_controller(self.revision), self._report)

    def _prepare(self) -> list[str]:
        """Check and write what processes need before the first starts; return the gateways' membership addresses."""
        self._listener = bind(self.revision.spec.host, self.revision.spec.port, reuse_port=False)
        self._listener.listen(BACKLOG)
        self._http_port = self._listener.getsockname()[1]
        secret = self._run_dir / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        return free_addresses(self.revision.spec.host)

    async def down(self, budget_s: float) -> None:
        """End everything: workers drain beside the gateway's open streams, then the gateway leaves."""
        self._closing = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
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

    async def start_gateway(self, revision: Revision) -> Slot:
        """Start a gateway at the free one of its two places."""
        free = next(slot_id for slot_id in GATEWAY_IDS if slot_id not in self._slots)
        return await self._start(free, "gateway", revision)

    async def start_worker(self, role: str, revision: Revision) -> Slot:
        """Start a worker under the lowest free number."""
        return await self._start(next_worker_id(role, set(self._slots)), role, revision)

    async def start_controller(self, revision: Revision) -> Slot:
        """Start the controller."""
        return await self._start(CONTROLLER_ID, "controller", revision)

    async def _start(self, slot_id: str, role: str, revision: Revision) -> Slot:
        slot = self._slots[slot_id] = self._make_slot(slot_id, role, revision)
        await self._launch(slot)
        return slot

    def _make_slot(self, slot_id: str, role: str, revision: Revision) -> Slot:
        slot = Slot(slot_id=slot_id, role=role, revision=revision, run_dir=self._run_dir, clock=self._clock)
        if role == "gateway" and self._listener is not None:
            slot.inherits = (self._listener.fileno(),)
        return slot

    def _threads(self, _role: str) -> int:
        return threads_per_worker(os.cpu_count() or 1, sum(self._want.values()))

    async def _launch(self, slot: Slot) -> None:
        if self._closing:
            raise ConfigError("the cluster is ending; nothing is started any more")
        threads = self._threads(slot.role)
        config = process_config(
            slot.revision,
            process_id=slot.id,
            role=slot.role,
            run_dir=self._run_dir,
            membership=self._membership,
            http_port=self._http_port,
            listener_fd=next(iter(slot.inherits), -1),
            threads=threads,
        )
        await slot.start(to_toml(config), overrides(slot.revision.spec, slot.role), threads)
        self._follow(slot)

    def _follow(self, slot: Slot) -> None:
        watcher = asyncio.create_task(self._watch(slot))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def wait_ready(self, slot: Slot, report: Report) -> None:
        """Wait until a process serves; raises ConfigError with its own last sentence if it ended instead."""
        was_ready = slot.state is SlotState.READY
        deadline = self._clock.now() + START_TIMEOUT_S
        while not (slot.poll_ready() and await self._is_registered(slot)):
            if slot.state in {SlotState.HELD, SlotState.GONE, SlotState.BACKOFF}:
                tail = slot.log_tail()
                raise ConfigError(f"{slot.id} did not start: {first_sentence(tail)} (log: {slot.log_path})")
            if self._clock.now() > deadline:
                raise DeadlineExceeded(f"{slot.id} was not ready after {START_TIMEOUT_S:.0f} s (log: {slot.log_path})")
            await asyncio.sleep(READY_POLL_S)
        if slot.role == "gateway":
            # Clients know the port: whoever serves after this one takes the same.
            self._http_port = int(str(slot.facts["http_address"]).rsplit(":", 1)[1])
        if not was_ready:
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
        asked, now = slot.asked or self._closing, self._clock.now()
        verdict = after_exit(slot.history, exit_code=code, was_asked=asked, started_at=slot.started_at, now=now)
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


def free_addresses(host: str) -> list[str]:
    """Return one address for each place of a gateway, with ports that are free now and that no kernel gives away."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports: set[int] = set()
    while len(ports) < len(GATEWAY_IDS):
        port = secrets.choice(MEMBERSHIP_PORTS)
        try:
            with socket.create_server((host, port), family=family):
                ports.add(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return [f"{host}:{port}" for port in ports]


def check_one_fingerprint(slots: Iterable[Slot]) -> None:
    """Raise ConfigError if workers of one revision could not be paired with each other."""
    told = {str(slot.facts["fingerprint"]): slot.id for slot in slots}
    if len(told) > 1:
        raise ConfigError(
            f"{' and '.join(sorted(told.values()))} have different fingerprints and would never be paired: "
            "give both pools the same model files, page size and drafts (--set all:KEY=VALUE)"
        )
