"""What surrounds every worker, whatever its role: health listener, life-cycle, admin, membership, ready file, leaving.

A role supplies a `WorkerBody`. Knows no engine, no transfer and no request.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

import msgspec

from core.aio import Tasks
from core.clock import Clock
from core.exported import ExportedStatistics
from core.ids import Incarnation
from core.lifecycle import Lifecycle, State
from core.listener import Listener, Probes
from core.metrics import Metrics
from core.process import Departure, ReadyFile, check_port
from core.rpc.admin import Description, Statistics, add_admin
from core.rpc.health import Health
from core.rpc.kv_index import add_kv_index
from core.rpc.membership_client import MembershipClient
from core.rpc.proof import Proof
from core.rpc.server import RpcServer
from core.worker import KvEventBatch, KvSnapshot, Load, Registration
from core.worker_config import WorkerSection

_LOG = logging.getLogger(__name__)

POLL_S = 0.25
"""How often load, statistics and metrics are refreshed: faster than heartbeats, so these are never older than that."""
LEAVE_S = 3.0
"""One membership TTL: how long the gateways get to acknowledge a goodbye."""
STOP_GRACE_S = 0.2


class WorkerBody(Protocol):
    """What a role does. Asyncio thread, except `heartbeat_age_s`."""

    async def load(self) -> Load:
        """Return the load report; the shell fills in the state."""
        ...

    async def statistics(self, audit: bool) -> Statistics:
        """Return counters and gauges; with `audit`, what a full page audit found."""
        ...

    async def snapshot(self) -> KvSnapshot:
        """Return the pages of the prefix tree as of its last event batch."""
        ...

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's thread last passed its loop. Any thread."""
        ...

    def begin_drain(self) -> None:
        """Refuse new work from now on."""
        ...

    async def finished(self) -> None:
        """Wait until no work is left."""
        ...

    async def hand_back(self) -> None:
        """End what is left in a way that lets others go on with it; takes a few seconds at most."""
        ...


class WorkerShell:
    """The surroundings of one worker process. Asyncio thread; probes run on listener threads."""

    def __init__(
        self,
        *,
        section: WorkerSection,
        kind: str,
        proof: Proof,
        metrics: Metrics,
        departure: Departure,
        clock: Clock,
    ) -> None:
        self._section = section
        self._kind = kind
        self._proof = proof
        self._metrics = metrics
        self._departure = departure
        self._clock = clock
        self._state = metrics.gauge("tandem_worker_state", "1 for the present state.", {"state": tuple(State)})
        self._phases = metrics.gauge(
            "tandem_worker_phase_seconds", "How long a state lasted: start-up, warm-up, drain.", {"state": tuple(State)}
        )
        self._entered_at, self._shown = clock.now(), State.STARTING
        self._lifecycle = Lifecycle(self._entered)
        self._body: WorkerBody | None = None
        self._membership: MembershipClient | None = None
        self._load: Load | None = None
        self._is_registered = False
        self._ticked_at = clock.now()
        self._health: Health | None = None
        self._facts: dict[str, Any] = {}
        self.http_address = ""

    @property
    def incarnation(self) -> Incarnation:
        """Of this process."""
        return self._proof.incarnation

    def open_listener(self, stack: AsyncExitStack) -> None:
        """Answer probes from now on; raises `ConfigError` if this port or the gRPC port is taken."""
        check_port(self._section.host, self._section.port)
        probes = Probes(
            live=self._live,
            ready=self._ready,
            started=self._started,
            metrics=self._metrics.render,
            status=self._status,
            drain=self._departure.begin_from_thread,
        )
        listener = Listener(self._section.host, self._section.http_port, probes)
        port = listener.start()
        stack.callback(listener.close)
        self.http_address = self._address(port)

    def _entered(self, state: State) -> None:
        _LOG.info("state: %s", state.value)
        now, before = self._clock.now(), self._shown
        self._phases.labels(before).set(now - self._entered_at)
        self._state.labels(before).set(0)
        self._state.labels(state).set(1)
        self._entered_at, self._shown = now, state

    def enter(self, state: State) -> None:
        """Move the life cycle while starting."""
        self._lifecycle.move(state)

    async def serve(
        self,
        stack: AsyncExitStack,
        server: RpcServer,
        body: WorkerBody,
        *,
        register: Callable[[str, str], Registration],
        exported: ExportedStatistics,
    ) -> None:
        """Bind the server, become READY, join the gateways, publish the ready file, leave when told; then return."""
        self._body = body
        add_admin(server, self)
        add_kv_index(server, body)
        port = await server.start(self._section.host, self._section.port)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        self._health = server.health
        registration = register(self._address(port), self.http_address)
        self._facts = _facts(registration)
        await self._refresh(body, exported)
        self._lifecycle.move(State.READY)
        membership = self._membership = MembershipClient(
            proof=self._proof,
            registration=registration,
            load=self._current_load,
            addresses=self._section.gateways,
            clock=self._clock,
            on_crash=self._departure.task_crashed,
        )
        stack.push_async_callback(membership.close)
        tasks = Tasks(self._departure.task_crashed)
        stack.push_async_callback(tasks.close)
        tasks.spawn(self._poll(body, exported), name="worker-poll")
        membership.start()
        ready_file = ReadyFile(self._section.run_dir, self._section.id)
        stack.callback(ready_file.remove)
        ready_file.write({"id": self._section.id, "kind": self._kind, **self._facts})
        await self._departure.wait()
        await self._leave(body, membership)

    def push_events(self, batch: KvEventBatch) -> None:
        """Send KV events to every gateway that knows us; those that miss some ask for a snapshot."""
        if self._membership is not None:
            self._membership.publish(batch)

    async def _leave(self, body: WorkerBody, membership: MembershipClient) -> None:
        if self._departure.error is not None:
            self._lifecycle.move(State.FAILED)
            return
        self._lifecycle.move(State.DRAINING)
        membership.report_load()
        if self._health is not None:
            await self._health.show(is_ready=False)

        async def finish() -> None:
            await membership.leave("draining", LEAVE_S)
            body.begin_drain()
            await body.finished()

        if not await self._departure.bound(finish()):
            body.begin_drain()
            await body.hand_back()
        self._lifecycle.move(State.FAILED if self._departure.error is not None else State.GONE)

    async def _poll(self, body: WorkerBody, exported: ExportedStatistics) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._refresh(body, exported)

    async def _refresh(self, body: WorkerBody, exported: ExportedStatistics) -> None:
        self._ticked_at = self._clock.now()
        self._is_registered = self._membership is not None and self._membership.holds_lease
        self._load = await body.load()
        exported.update((await body.statistics(audit=False)).values)
        if self._health is not None:
            await self._health.show(not self._ready())

    def _address(self, port: int) -> str:
        host = self._section.advertise_host or self._section.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _current_load(self) -> Load:
        assert self._load is not None
        return msgspec.structs.replace(self._load, state=self._lifecycle.state)

    # Probes: on listener threads, reading single attributes only.

    def _live(self) -> str:
        if self._departure.error is not None:
            return f"the engine crashed: {self._departure.error}"
        if self._body is None:
            return ""
        silent_s = max(self._body.heartbeat_age_s(), self._clock.now() - self._ticked_at)
        return "" if silent_s < self._section.stall_s else f"no progress for {silent_s:.1f} s"

    def _ready(self) -> str:
        if not self._lifecycle.accepts_work:
            return f"the worker is {self._lifecycle.state.value}"
        if self._section.gateways and not self._is_registered:
            return "no gateway holds this worker's registration"
        return ""

    def _started(self) -> str:
        state = self._lifecycle.state
        return f"the worker is {state.value}" if state in {State.STARTING, State.LOADING, State.WARMING} else ""

    def _status(self) -> Mapping[str, Any]:
        load = self._load
        return {
            "id": self._section.id,
            "kind": self._kind,
            "incarnation": self.incarnation,
            "state": self._lifecycle.state.value,
            **self._facts,
            "load": msgspec.to_builtins(load) if load is not None else None,
        }

    # AdminService

    async def describe(self) -> Description:
        """Say what this worker is."""
        return Description(
            name=self._section.id,
            incarnation=self.incarnation,
            kind=self._kind,
            state=self._lifecycle.state,
            facts=self._facts,
        )

    async def drain(self, budget_s: float) -> State:
        """Begin to leave; the process ends when its work is done or the budget is over."""
        self._departure.begin(budget_s)
        return State.DRAINING

    async def statistics(self, audit: bool) -> Statistics:
        """Return the body's statistics."""
        assert self._body is not None
        return await self._body.statistics(audit)


def _facts(registration: Registration) -> dict[str, Any]:
    return {
        "address": registration.address,
        "http_address": registration.http_address,
        "incarnation": registration.incarnation,
        "model": registration.model,
        "fingerprint": registration.fingerprint.hex(),
        "page_tokens": registration.page_tokens,
        "num_pages": registration.num_pages,
        "num_rows": registration.num_rows,
        "max_tokens_total": registration.max_tokens_total,
        "transports": list(registration.transports),
    }
