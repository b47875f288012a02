"""`tandem status|scale|drain|rollout --on k8s`: what the command line does on a Kubernetes cluster, through kubectl.

Installing and removing is kubectl's own: `kubectl apply -k OVERLAY`, `kubectl delete -k OVERLAY`.
"""

import asyncio
import subprocess
from collections.abc import Callable, Sequence
from typing import cast

from core.clock import SystemClock
from core.errors import ConfigError
from deploy.actuators.factory import REMOVE_TIMEOUT_S
from deploy.actuators.kubectl_api import KubectlApi
from deploy.actuators.kubernetes import LEASE, KubernetesActuator
from deploy.actuators.kubernetes_api import KubernetesApi
from deploy.cluster_description import ROLES
from deploy.local.control import Progress, Reply

ROLLED = ("decode", "prefill", "gateway")
"""In this order, one at a time: a pool that fails to come up stops the rest."""


def k8s_ask(namespace: str, body: Reply, report: Progress, kubectl: Sequence[str] = ("kubectl",)) -> Reply:
    """Carry out one command and return the cluster's status; raises ConfigError for one that cannot be."""
    api = KubectlApi(namespace, kubectl)
    actuator = KubernetesActuator(
        api,
        SystemClock(),
        namespace=namespace,
        remove_timeout_s=REMOVE_TIMEOUT_S,
        drain=api.drain,
    )
    match body["command"]:
        case "status":
            pass
        case "scale":
            for role, count in cast("dict[str, int]", body["pools"]).items():
                asyncio.run(scale(actuator, role, count, fence_of(api), report))
        case "drain":
            asyncio.run(actuator.remove(str(body["worker"]), fence=fence_of(api)))
        case "rollout" if not body.get("sets") and not body.get("model_dir"):
            _roll([*kubectl, "--namespace", namespace], report)
        case _:
            raise ConfigError(
                f"{body['command']} with other settings is kubectl's on Kubernetes: change cluster.yaml, then "
                "tandem render --on k8s, then kubectl apply -k"
            )
    return status(api, actuator)


def fence_of(api: KubernetesApi) -> int:
    """Return the fence of the controller that leads: a person acts in its name, and it may act differently later."""
    return int(api.get(LEASE).get("spec", {}).get("leaseTransitions") or 0)


async def scale(actuator: KubernetesActuator, role: str, count: int, fence: int, report: Progress) -> None:
    """Bring one pool to a size; who leaves drains first, the youngest names last."""
    if role not in ROLES:
        raise ConfigError(f"there is no pool {role!r}; the pools are prefill and decode")
    await actuator.ensure(role, count, fence=fence)
    staying = [i.id for i in await actuator.list() if i.role == role and i.state != "draining"]
    for worker in staying[count:]:
        report(f"{worker}: draining")
        await actuator.remove(worker, fence=fence)
        report(f"{worker}: gone")


def status(api: KubernetesApi, actuator: KubernetesActuator) -> Reply:
    """Return what `tandem status` shows."""
    service = api.get("api/v1:services/gateway")
    processes = [
        {"id": i.id, "role": i.role, "state": i.state, "reason": i.reason} for i in asyncio.run(actuator.list())
    ]
    return {
        "name": str(service["metadata"]["namespace"]),
        "model": "Kubernetes",
        "http_address": service["spec"]["clusterIP"],
        "processes": processes,
    }


def _roll(kubectl: Sequence[str], report: Callable[[str], None]) -> None:
    for role in ROLLED:
        for arguments in (["restart", f"deployment/{role}"], ["status", f"deployment/{role}"]):
            done = subprocess.run([*kubectl, "rollout", *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(f"{role} was not rolled out: {done.stderr.strip()}")
        report(f"{role}: replaced")
