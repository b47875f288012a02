"""The actuator of Kubernetes: two Deployments, `prefill` and `decode`, sized through /scale; who leaves is our choice.

Drain before remove: the chosen pod drains, is not ready, and only then the count goes down by one. A ReplicaSet deletes
pods that are not ready before ready ones, so the one that goes is the one that drained; its deletion cost says the same
(Kubernetes 1.22 and newer).
"""

import asyncio
import http.client
import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

from core.clock import Clock
from core.errors import ConfigError
from deploy.actuators.api import Instance, StaleFence
from deploy.actuators.kubernetes_api import Body, Conflict, KubernetesApi
from deploy.cluster_description import ROLES

_LOG = logging.getLogger(__name__)
ROLE_LABEL = "tandem/role"
LEASE = "apis/coordination.k8s.io/v1:leases/tandem-controller"
LEAVING_COST = "-1000"
POLL_S = 0.5
NOT_READY_S = 30.0
"""How long a pod may take to show that it drains; its readiness probe needs 6 s."""
DRAIN_TIMEOUT_S = 5.0
ATTEMPTS = 5


class KubernetesActuator:
    """One cluster in one namespace. `remove_timeout_s` bounds a removal: its grace period and some slack."""

    def __init__(
        self,
        api: KubernetesApi,
        clock: Clock,
        *,
        namespace: str,
        remove_timeout_s: float,
        drain: Callable[[Body], None] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        """`drain` asks a pod to drain; blocking, raises OSError or ConfigError."""
        self._api = api
        self._clock = clock
        self._namespace = namespace
        self._remove_timeout_s = remove_timeout_s
        self._drain = drain or post_drain
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
        if pod is None or is_leaving(pod):
            return
        role = str(pod["metadata"]["labels"][ROLE_LABEL])
        annotation = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": LEAVING_COST}}}
        await asyncio.to_thread(self._api.patch, f"api/v1:pods/{worker_id}", annotation)
        try:
            await asyncio.to_thread(self._drain, pod)
        except (OSError, http.client.HTTPException, ConfigError) as error:
            # Dead or cut off: not ready already, or soon.
            _LOG.warning("%s does not take its goodbye: %s", worker_id, error)
        if not await self._until(worker_id, lambda p: p is None or not is_ready(p), NOT_READY_S):
            raise ConfigError(f"{worker_id} was asked to drain but stays ready; it is not removed")
        await self._resize(role, lambda current: max(0, current - 1), fence)
        if not await self._until(worker_id, lambda p: p is None, self._remove_timeout_s):
            raise ConfigError(f"{worker_id} is still there after {self._remove_timeout_s:g} s; see its events")

    def describe(self) -> dict[str, object]:
        return {"place": "k8s", "namespace": self._namespace}

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
        """Set a Deployment's count; a write that another one overtook is decided anew."""
        path = f"apis/apps/v1:deployments/{role}/scale"
        for attempt in range(ATTEMPTS):
            await self._check_fence(fence)
            scale = await asyncio.to_thread(self._api.get, path)
            current = int(scale["spec"].get("replicas", 0))
            if (wanted := size(current)) == current:
                return
            scale["spec"]["replicas"] = wanted
            try:
                await asyncio.to_thread(self._api.put, path, scale)
            except Conflict:
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            _LOG.info("%s: %d -> %d pods", role, current, wanted)
            return

    async def _check_fence(self, fence: int) -> None:
        lease = await asyncio.to_thread(self._api.get, LEASE)
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
    cost = metadata.get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost")
    return bool(metadata.get("deletionTimestamp")) or cost == LEAVING_COST


def is_ready(pod: Body) -> bool:
    """Whether the pod's readiness probe passes."""
    return _condition(pod.get("status", {}), "Ready").get("status") == "True"


def metrics_port(pod: Body) -> int:
    """Return the port of a worker's listener."""
    ports: list[dict[str, Any]] = pod["spec"]["containers"][0].get("ports", [])
    return next((int(port["containerPort"]) for port in ports if port.get("name") == "metrics"), 9400)


def post_drain(pod: Body) -> None:
    """Ask a pod's process to drain, from inside of the cluster; blocking, raises OSError."""
    connection = http.client.HTTPConnection(
        str(pod["status"].get("podIP", "")), metrics_port(pod), timeout=DRAIN_TIMEOUT_S
    )
    try:
        connection.request("POST", "/drain")
        connection.getresponse().read()
    finally:
        connection.close()


def _condition(status: Body, kind: str) -> Body:
    return next((c for c in status.get("conditions", []) if c.get("type") == kind), {})


def _unscheduled(status: Body) -> str:
    condition = _condition(status, "PodScheduled")
    return str(condition.get("message", "")) if condition.get("status") == "False" else ""


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise ConfigError(f"there is no pool {role!r}; the pools are prefill and decode")
