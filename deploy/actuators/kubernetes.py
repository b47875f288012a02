"""The actuator of Kubernetes: two Deployments, `prefill` and `decode`, sized through /scale; who leaves is our choice.

Drain before remove: the chosen pod drains, is not ready, and only then the count goes down by one. A ReplicaSet deletes
pods that are not ready before ready ones, so the one that goes is the one that drained; its deletion cost says the same
(Kubernetes 1.22 and newer).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

from core.clock import Clock
from core.errors import ConfigError, TandemError
from deploy.actuators.api import Instance, StaleFence
from deploy.actuators.kubernetes_api import Body, Conflict, KubernetesApi
from deploy.cluster_description import GRACE_SLACK_S, PRE_STOP_S, ROLES, PortsPart

_LOG = logging.getLogger(__name__)
ROLE_LABEL = "tandem/role"
DEPLOYMENTS = "apis/apps/v1:deployments"
LEASE = "apis/coordination.k8s.io/v1:leases/tandem-controller"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEAVING_COST = "-1000"
POLL_S = 0.5
NOT_READY_S = 30.0
"""How long a pod may take to show that it drains; its readiness probe needs 6 s."""
ATTEMPTS = 5
COMING = {"starting", "backoff"}
"""States of pods that a ReplicaSet deletes first."""


class KubernetesActuator:
    """One cluster in one namespace. `remove_timeout_s` bounds a removal: its grace period and some slack."""

    def __init__(
        self,
        api: KubernetesApi,
        clock: Clock,
        *,
        namespace: str,
        remove_timeout_s: float,
        drain: Callable[[Body], Awaitable[None]],
        poll_s: float = POLL_S,
    ) -> None:
        """`drain` asks a pod's process to drain and returns once it has begun; raises TandemError."""
        self._api = api
        self._clock = clock
        self._namespace = namespace
        self._remove_timeout_s = remove_timeout_s
        self._drain = drain
        self._poll_s = poll_s

    async def list(self) -> tuple[Instance, ...]:
        found = [instance_of(pod) for pod in await self._pods()]
        return tuple(sorted(found, key=lambda instance: instance.id))

    async def ensure(self, role: str, count: int, *, fence: int) -> None:
        _check_role(role)
        await self._resize(role, lambda current: max(current, count), fence)

    async def remove(self, worker_id: str, *, fence: int) -> None:
        await self._check_fence(fence)
        pod = await self._pod(worker_id)
        if pod is None or pod["metadata"].get("deletionTimestamp"):
            return
        role = str(pod["metadata"]["labels"][ROLE_LABEL])
        if is_ready(pod):
            await self._wait_for_others(role, worker_id)
        await self._mark(worker_id, LEAVING_COST)
        try:
            await self._drain(pod)
        except TandemError as error:
            # Dead or cut off: not ready already, or soon.
            _LOG.warning("%s does not take its goodbye: %s", worker_id, error.message)
        if not await self._until(worker_id, lambda p: p is None or not is_ready(p), NOT_READY_S):
            await self._mark(worker_id, None)
            raise ConfigError(f"{worker_id} was asked to drain but stays ready; it is not removed")
        await self._resize(role, lambda current: max(0, current - 1), fence)
        if not await self._until(worker_id, lambda p: p is None, self._remove_timeout_s):
            raise ConfigError(f"{worker_id} is still there after {self._remove_timeout_s:g} s; see its events")

    def describe(self) -> dict[str, object]:
        return {"place": "k8s", "namespace": self._namespace}

    async def _wait_for_others(self, role: str, chosen: str) -> None:
        """Wait until no other pod of a pool is on its way: it would be deleted before one that was ready and drained."""
        end = self._clock.now() + self._remove_timeout_s
        while coming := [i for i in await self.list() if i.role == role and i.id != chosen and i.state in COMING]:
            if self._clock.now() > end or coming[0].state == "backoff":
                raise ConfigError(
                    f"{coming[0].id} is not ready ({coming[0].reason or coming[0].state}), and Kubernetes would remove "
                    f"it instead of {chosen}; remove that one, or wait until it serves"
                )
            await asyncio.sleep(self._poll_s)

    async def _mark(self, worker_id: str, cost: str | None) -> None:
        """Set or take back the mark of a pod that is chosen to leave."""
        body = {"metadata": {"annotations": {DELETION_COST: cost}}}
        await asyncio.to_thread(self._api.patch, f"api/v1:pods/{worker_id}", body)

    async def _pods(self) -> tuple[Body, ...]:
        query = {"labelSelector": f"{ROLE_LABEL} in ({','.join(ROLES)})"}
        return tuple(cast("Iterable[Body]", (await asyncio.to_thread(self._api.get, "api/v1:pods", query))["items"]))

    async def _pod(self, name: str) -> Body | None:
        return next((pod for pod in await self._pods() if pod["metadata"]["name"] == name), None)

    async def _until(self, name: str, holds: Callable[[Body | None], bool], timeout_s: float) -> bool:
        end = self._clock.now() + timeout_s
        while not holds(await self._pod(name)):
            if self._clock.now() > end:
                return False
            await asyncio.sleep(self._poll_s)
        return True

    async def _resize(self, role: str, size: Callable[[int], int], fence: int) -> None:
        """Set a pool's count."""
        await resize(self._api, role, size, fence)

    async def _check_fence(self, fence: int) -> None:
        await check_fence(self._api, fence)


async def resize(api: KubernetesApi, deployment: str, size: Callable[[int], int], fence: int) -> None:
    """Set a Deployment's count to `size` of the present one; a write that another one overtook is decided anew.

    Raises StaleFence if another holds the lease by now, Conflict if others never stop writing.
    """
    path = f"{DEPLOYMENTS}/{deployment}/scale"
    for attempt in range(ATTEMPTS):
        await check_fence(api, fence)
        scale = await asyncio.to_thread(api.get, path)
        current = int(scale["spec"].get("replicas", 0))
        if (wanted := size(current)) == current:
            return
        scale["spec"]["replicas"] = wanted
        try:
            await asyncio.to_thread(api.put, path, scale)
        except Conflict:
            if attempt == ATTEMPTS - 1:
                raise
            continue
        _LOG.info("%s: %d -> %d pods", deployment, current, wanted)
        return


async def check_fence(api: KubernetesApi, fence: int) -> None:
    """Raise StaleFence if the lease was taken after this fence."""
    lease = await asyncio.to_thread(api.get, LEASE)
    newest = int(lease.get("spec", {}).get("leaseTransitions") or 0)
    if newest > fence:
        raise StaleFence(f"controller {fence} was replaced by controller {newest}; this one must stop")


def instance_of(pod: Body) -> Instance:
    """Return a pod as the controller sees it; pure."""
    status = pod.get("status", {})
    waiting = [c.get("state", {}).get("waiting", {}) for c in status.get("containerStatuses", [])]
    reasons = [str(w["reason"]) for w in waiting if w.get("reason")]
    if is_leaving(pod):
        state = "draining"
    elif status.get("phase") in {"Failed", "Succeeded"}:
        state = "gone"
    elif is_ready(pod):
        state = "ready"
    else:
        state = "backoff" if "CrashLoopBackOff" in reasons else "starting"
    labels = pod["metadata"].get("labels", {})
    return Instance(
        id=str(pod["metadata"]["name"]),
        role=str(labels.get(ROLE_LABEL, "")),
        state=state,
        reason=", ".join(reasons) or _unscheduled(status),
        domain=str(labels.get("tandem/slice", "")),
    )


def is_leaving(pod: Body) -> bool:
    """True once Kubernetes deletes the pod, or once we chose it."""
    metadata = pod["metadata"]
    cost = metadata.get("annotations", {}).get(DELETION_COST)
    return bool(metadata.get("deletionTimestamp")) or cost == LEAVING_COST


def is_ready(pod: Body) -> bool:
    """Whether the pod's readiness probe passes."""
    return _condition(pod.get("status", {}), "Ready").get("status") == "True"


def drain_budget_s(pod: Body) -> float:
    """Return what a pod's grace period leaves for its drain."""
    return max(0.0, float(pod["spec"].get("terminationGracePeriodSeconds", 30)) - PRE_STOP_S - GRACE_SLACK_S)


def worker_address(pod: Body) -> str:
    """Return host:port of a worker's gRPC server."""
    ports: list[dict[str, Any]] = pod["spec"]["containers"][0].get("ports", [])
    port = next((int(port["containerPort"]) for port in ports if port.get("name") == "worker"), PortsPart().worker)
    host = str(pod["status"].get("podIP", ""))
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _condition(status: Body, kind: str) -> Body:
    return next((c for c in status.get("conditions", []) if c.get("type") == kind), {})


def _unscheduled(status: Body) -> str:
    condition = _condition(status, "PodScheduled")
    return str(condition.get("message", "")) if condition.get("status") == "False" else ""


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise ConfigError(f"there is no pool {role!r}; the pools are prefill and decode")
