"""What a gateway process says of itself: to operators over gRPC, to probes over HTTP, to Prometheus. Reads only."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from core.clock import Clock
from core.ids import Incarnation
from core.lifecycle import Lifecycle, State
from core.rpc.admin import Description, Statistics
from core.worker import Role
from gateway.admission import Admission
from gateway.directory import Directory, Member
from gateway.fleet import Bools
from gateway.leases import Leases
from gateway.links import Links
from gateway.metrics import GatewayMetrics
from gateway.prefix_index import PrefixIndex
from gateway.scaling_figures import scaling_figures
from gateway.worker_gauges import WorkerGauges

KIND = "gateway"


class GatewayAdmin:
    """Implements `core.rpc.admin.AdminService` and supplies the probes' answers."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: Incarnation,
        lifecycle: Lifecycle,
        directory: Directory,
        index: PrefixIndex,
        links: Links,
        admission: Admission,
        metrics: GatewayMetrics,
        clock: Clock,
        drain: Callable[[float | None], None],
        stall_s: float,
        leases: Leases,
        gauges: WorkerGauges,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._lifecycle = lifecycle
        self._directory = directory
        self._index = index
        self._links = links
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._drain = drain
        self._stall_s = stall_s
        self._leases = leases
        self._gauges = gauges
        self._turned_at = clock.now()
        self._facts: Mapping[str, Any] = {}
        self._status: Mapping[str, Any] = {}

    def publish(self, facts: Mapping[str, Any]) -> None:
        """Set the static facts: addresses, model."""
        self._facts = facts

    def refresh(self) -> None:
        """Take a picture for other threads, and set the gauges. Event loop's thread; call it about twice a second."""
        now = self._turned_at = self._clock.now()
        metrics, fleet = self._metrics, self._directory.fleet
        ready = fleet.used & fleet.ready & (fleet.lease_until > now) & (fleet.open_until <= now)
        for role, mask in ((Role.PREFILL, fleet.prefill), (Role.DECODE, fleet.decode)):
            metrics.workers.labels(role.value).set(_count(ready & mask))
            metrics.members.labels(role.value).set(_count(fleet.used & mask))
        metrics.in_flight.set(self._admission.in_flight)
        metrics.queued.set(self._admission.queued)
        metrics.index_pages.set(len(self._index))
        metrics.index_resyncs.set(self._index.counts.resyncs)
        metrics.index_gaps.set(self._index.counts.gaps)
        metrics.index_bytes.set(self._index.nbytes)
        metrics.links.set(len(self._links))
        for kind, count in self._leases.counts().items():
            metrics.leases.labels(kind).set(count)
        self._gauges.show(
            ((member, bool(ready[member.slot])) for member in self._directory), self._clock, self._directory.ttl_s
        )
        metrics.step_frames.set(sum(link.num_frames for link in self._links))
        self._status = {
            "id": self._name,
            "kind": KIND,
            "incarnation": self._incarnation,
            "state": self._lifecycle.state.value,
            **self._facts,
            "in_flight": self._admission.in_flight,
            "queued": self._admission.queued,
            "leases": self._leases.counts(),
            "time_s": metrics.time_split(),
            "tokens": metrics.token_totals(),
            "workers": [self._describe_member(member, bool(ready[member.slot])) for member in self._directory],
        }

    def _describe_member(self, member: Member, ready: bool) -> Mapping[str, Any]:
        told, load = member.registration, member.load
        return {
            "id": told.worker_id,
            "role": told.role.value,
            "incarnation": told.incarnation,
            "address": told.address,
            "http_address": told.http_address,
            "model": told.model,
            "fingerprint": told.fingerprint.hex()[:12],
            "prefill_mode": told.prefill_mode,
            "transports": told.transports,
            "max_tokens_total": told.max_tokens_total,
            "state": load.state.value if load is not None else State.STARTING.value,
            "routable": ready,
            "failures": member.breaker.failures,
            "running": load.running_requests if load is not None else 0,
            "waiting": load.waiting_requests if load is not None else 0,
            "prefill_tokens_per_s": load.prefill_tokens_per_s if load is not None else 0.0,
            "step_ms": load.step_ms if load is not None else 0.0,
            "index_pages": self._index.pages(member.slot),
        }

    # Probes: on listener threads, reading single attributes only.

    def live(self) -> str:
        """Fail if the event loop does not turn."""
        silent_s = self._clock.now() - self._turned_at
        return "" if silent_s < self._stall_s else f"the event loop has not turned for {silent_s:.1f} s"

    def ready(self) -> str:
        """Fail unless this process takes requests. Whether workers are up is each answer's business (503)."""
        return "" if self._lifecycle.accepts_work else f"the gateway is {self._lifecycle.state.value}"

    def started(self) -> str:
        """Fail before the sockets are bound."""
        return "the gateway is starting" if self._lifecycle.state is State.STARTING else ""

    def status(self) -> Mapping[str, Any]:
        """Return the last picture."""
        return self._status

    # AdminService

    async def describe(self) -> Description:
        return Description(
            name=self._name,
            incarnation=self._incarnation,
            kind=KIND,
            state=self._lifecycle.state,
            facts=self._facts,
        )

    async def drain(self, budget_s: float) -> State:
        self._drain(budget_s)
        return State.DRAINING

    async def statistics(self, audit: bool) -> Statistics:
        self.refresh()
        fleet = self._directory.fleet
        findings: list[str] = []
        if audit:
            # Nothing may be counted as sent and open when no request is.
            open_requests = int(fleet.own_requests.sum())
            if not self._admission.in_flight and open_requests:
                findings.append(f"{open_requests} requests are counted at workers, but none is in flight")
            if bool((fleet.own_tokens < 0).any()) or bool((fleet.own_requests < 0).any()):
                findings.append("work was given back twice")
        return Statistics(
            values={
                "in_flight": float(self._admission.in_flight),
                "queued": float(self._admission.queued),
                "workers": float(len(self._directory)),
                "links": float(len(self._links)),
                "open_handles": float(sum(link.num_open for link in self._links)),
                "step_frames": float(sum(link.num_frames for link in self._links)),
                "index_pages": float(len(self._index)),
                "index_resyncs": float(self._index.counts.resyncs),
                "index_gaps": float(self._index.counts.gaps),
                **{f"leases_{kind}": float(count) for kind, count in self._leases.counts().items()},
                "own_tokens": float(fleet.own_tokens.sum()),
                "own_requests": float(fleet.own_requests.sum()),
                **scaling_figures(
                    admission=self._admission,
                    metrics=self._metrics,
                    directory=self._directory,
                    now=self._clock.now(),
                ),
            },
            audit_findings=tuple(findings),
        )


def _count(mask: Bools) -> int:
    return int(np.count_nonzero(mask))
