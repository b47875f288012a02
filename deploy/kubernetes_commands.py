"""`tandem status|scale|drain|rollout --on k8s`: what the command line does on a Kubernetes cluster, through kubectl.

Installing and removing is kubectl's own: `kubectl apply -k OVERLAY`, `kubectl delete -k OVERLAY`.
"""

import asyncio
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import cast

from core.clock import SystemClock
from core.errors import ConfigError
from core.ids import fresh_incarnation
from deploy.actuators.api import StaleFence
from deploy.actuators.factory import REMOVE_TIMEOUT_S
from deploy.actuators.kubectl_api import KubectlApi
from deploy.actuators.kubernetes import LEASE, KubernetesActuator
from deploy.actuators.kubernetes_api import KubernetesApi
from deploy.cluster_description import ROLES
from deploy.controller.lease import LeaseLock
from deploy.kubernetes_rollout import PairRollout, is_running
from deploy.local.control import Progress, Reply
from deploy.validate_k8s import build

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
    if body["command"] in {"scale", "drain"} and is_running(api):
        raise ConfigError("a rollout is running; wait for it, or end it with: tandem rollout --on k8s --abort")
    match body["command"]:
        case "status":
            pass
        case "scale":
            for role, count in cast("dict[str, int]", body["pools"]).items():
                asyncio.run(scale(actuator, role, count, fence_of(api), report))
        case "drain":
            asyncio.run(actuator.remove(str(body["worker"]), fence=fence_of(api)))
        case "rollout" if body.get("to"):
            docs = build(Path(str(body["to"])), kubectl[0])
            asyncio.run(as_leader(api, lambda fence: _pairs(api, fence, body, report).run(docs)))
        case "rollout" if not body.get("sets") and not body.get("model_dir"):
            _roll([*kubectl, "--namespace", namespace], report)
        case "abort":
            asyncio.run(as_leader(api, lambda fence: _pairs(api, fence, body, report).back("aborted")))
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
    """Bring one pool to a size; who leaves drains first. Those go that do not serve yet, then the last names."""
    if role not in ROLES:
        raise ConfigError(f"there is no pool {role!r}; the pools are prefill and decode")
    await actuator.ensure(role, count, fence=fence)
    staying = [i for i in await actuator.list() if i.role == role and i.state != "draining"]
    for worker in [i.id for i in sorted(staying, key=lambda i: i.state != "ready")][count:]:
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


def _pairs(api: KubectlApi, fence: int, body: Reply, report: Progress) -> PairRollout:
    surge = int(cast("int", body.get("surge", 1)))
    return PairRollout(api, SystemClock(), fence=fence, report=report, surge=surge)


async def as_leader(api: KubernetesApi, work: Callable[[int], Coroutine[None, None, None]]) -> None:
    """Do `work` under a fence of its own, so that neither the controller nor a second command sizes pools meanwhile."""
    lock = LeaseLock(api, SystemClock(), f"rollout-{fresh_incarnation()}")
    fence = await lock.seize()
    renewing, working = asyncio.create_task(lock.renew()), asyncio.create_task(work(fence))
    try:
        await asyncio.wait({renewing, working}, return_when=asyncio.FIRST_COMPLETED)
        (working if working.done() else renewing).result()
    except StaleFence as error:
        raise ConfigError("another command, or a controller, took over; this one changes nothing more") from error
    finally:
        for task in (renewing, working):
            task.cancel()
        await asyncio.gather(renewing, working, return_exceptions=True)
        await lock.release()


def _roll(kubectl: Sequence[str], report: Callable[[str], None]) -> None:
    for role in ROLLED:
        for arguments in (["restart", f"deployment/{role}"], ["status", f"deployment/{role}"]):
            done = subprocess.run([*kubectl, "rollout", *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(f"{role} was not rolled out: {done.stderr.strip()}")
        report(f"{role}: replaced")
