"""Replaces both pools on Kubernetes as whole pairs: `tandem rollout --on k8s --to FOLDER`.

The new revision stands beside the old one as a second pair of Deployments, `prefill-new` and `decode-new`; both pairs
move in the steps of `deploy.rollout_plan`. At the end Deployments of the usual names take the new pods over, without a
restart. What a command must know that follows a killed one is in the cluster: the same command goes on, `--abort` goes back.
"""

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from core.clock import Clock
from core.errors import ConfigError, DeadlineExceeded, TandemError
from deploy.actuators.api import Instance, StaleFence
from deploy.actuators.kubernetes import DEPLOYMENTS, ROLE_LABEL, check_fence, instance_of, resize
from deploy.actuators.kubernetes_api import Body, KubernetesApi
from deploy.cluster_description import ROLES
from deploy.rollout_plan import rollout_steps

WANT = "tandem/rollout-want"
"""Annotation of the new pair: the size of its pool when the rollout began."""
READY_TIMEOUT_S = 3600.0
"""As long as a startup probe may take; a pod that crashes ends the wait at once."""
SETTLE_S = 3.0
"""One lease: a pod that is ready then also is in every gateway's list."""
POLL_S = 2.0
"""Each look is a program that starts."""
Doc = Mapping[str, Any]


class RolloutApi(KubernetesApi, Protocol):
    """What a rollout needs beyond sizing."""

    def apply(self, docs: Sequence[Doc]) -> None:
        """Apply whole objects."""
        ...

    def delete(self, deployment: str, *, keep_pods: bool) -> None:
        """Remove a Deployment, if it is there; with `keep_pods` its pods stay, for another Deployment that takes them."""
        ...

    async def statusz(self, pod: str) -> Body:
        """Return what a pod's process says of itself."""
        ...


def new_name(role: str) -> str:
    """Return the name of a pool's Deployment of the revision that comes."""
    return f"{role}-new"


def deployments_of(api: KubernetesApi) -> dict[str, Body]:
    """Return the Deployments of the namespace by name."""
    return {str(item["metadata"]["name"]): item for item in api.get(DEPLOYMENTS)["items"]}


def is_running(api: KubernetesApi) -> bool:
    """Whether a rollout of pairs was begun and neither finished nor taken back."""
    return any(new_name(role) in deployments_of(api) for role in ROLES)


class PairRollout:
    """One rollout under one fence. `run` or `back`, once; both raise StaleFence when another command takes over."""

    def __init__(
        self,
        api: RolloutApi,
        clock: Clock,
        *,
        fence: int,
        report: Callable[[str], None],
        surge: int = 1,
        settle_s: float = SETTLE_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._api = api
        self._clock = clock
        self._fence = fence
        self._report = report
        self._surge = surge
        self._settle_s = settle_s
        self._poll_s = poll_s

    async def run(self, docs: Sequence[Doc]) -> None:
        """Bring the workers of an overlay's objects into service, then apply the rest; goes on where a killed one ended.

        Raises ConfigError with the reason once the old revision serves again in full.
        """
        pools = {role: doc for doc in docs for role in ROLES if is_pool(doc, role)}
        if set(pools) != {*ROLES}:
            raise ConfigError("the folder has no Deployments prefill and decode; other workloads roll by themselves")
        want, counts = await asyncio.to_thread(self._begun)
        if not want and (missing := [role for role in ROLES if not counts.get(role)]):
            raise ConfigError(f"{missing[0]} has no pods to keep serving with; apply the folder with kubectl instead")
        if all(counts.get(role) for role in ROLES):
            want = want or {role: counts[role] for role in ROLES}
            await asyncio.to_thread(self._api.apply, [d for d in docs if d["kind"] == "ConfigMap"])
            await asyncio.to_thread(self._api.apply, [beside(pools[role], want) for role in ROLES])
            try:
                await self._forward(want)
            except StaleFence:
                raise
            except TandemError as error:
                await self.back(error.message)
                raise ConfigError(f"the rollout went back: {error.message}") from error
        await self._finish(docs, want)

    async def back(self, reason: str) -> None:
        """Let the old pair serve again in full, then remove the new one; raises ConfigError if there is no old pair."""
        want, counts = await asyncio.to_thread(self._begun)
        if not want:
            raise ConfigError("no rollout is running")
        if not all(counts.get(role) for role in ROLES):
            raise ConfigError(
                "the old workers are gone: end this rollout with its own command, then roll the old folder out"
            )
        self._report(f"going back: {reason}")
        for role, count in want.items():
            await self._size(role, count)
        await self._ready(want)
        for name in (new_name(role) for role in ROLES if new_name(role) in counts):
            await self._size(name, 0)
            await asyncio.to_thread(self._api.delete, name, keep_pods=False)

    async def _forward(self, want: Mapping[str, int]) -> None:
        """One whole pair of either revision is ready at any moment, and never fewer workers than wanted."""
        for number, step in enumerate(rollout_steps(want, self._surge)):
            for role, count in step.new.items():
                await self._size(new_name(role), count, grow=True)
            await self._ready({new_name(role): count for role, count in step.new.items()})
            if number == 0:
                await self._check_pair()
            for role, count in step.old.items():
                await self._size(role, count, grow=False)
            self._report(f"new {dict(step.new)}, old {dict(step.old)}")

    async def _finish(self, docs: Sequence[Doc], want: Mapping[str, int]) -> None:
        """Deployments of the usual names take the new pods over: equal templates make them theirs."""
        final = [sized(doc, want) for doc in docs]
        found = await asyncio.to_thread(deployments_of, self._api)
        for role in ROLES:
            await check_fence(self._api, self._fence)
            if new_name(role) in found:
                await asyncio.to_thread(self._api.delete, role, keep_pods=False)
                await asyncio.to_thread(self._api.delete, new_name(role), keep_pods=True)
            await asyncio.to_thread(self._api.apply, [d for d in final if is_pool(d, role)])
        await self._ready(want)
        await asyncio.to_thread(self._api.apply, final)
        self._report("the new revision serves alone")

    def _begun(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return what each pool had when a rollout began, {} if none did; and the present counts of all Deployments."""
        found = deployments_of(self._api)
        counts = {name: int(item["spec"].get("replicas", 0)) for name, item in found.items()}
        new = [found[new_name(role)] for role in ROLES if new_name(role) in found]
        want = cast("dict[str, int]", json.loads(new[0]["metadata"]["annotations"][WANT])) if new else {}
        return want, counts

    async def _check_pair(self) -> None:
        """Raise ConfigError if the new workers would never be paired with each other."""
        found = await asyncio.to_thread(self._workers)
        told: dict[str, str] = {}
        for role in ROLES:
            pod = next(i.id for i in found.get(new_name(role), ()) if i.state == "ready")
            told[role] = str((await self._api.statusz(pod))["fingerprint"])
        if len(set(told.values())) != 1:
            raise ConfigError(f"the new workers have different fingerprints and would never be paired: {told}")

    def _workers(self) -> dict[str, list[Instance]]:
        """Return the pods of both pools by the name of the Deployment that owns them."""
        query = {"labelSelector": f"{ROLE_LABEL} in ({','.join(ROLES)})"}
        sets = {s["metadata"]["name"]: owner(s) for s in self._api.get("apis/apps/v1:replicasets", query)["items"]}
        found: dict[str, list[Instance]] = {}
        for pod in self._api.get("api/v1:pods", query)["items"]:
            found.setdefault(sets.get(owner(pod), ""), []).append(instance_of(pod))
        return found

    async def _size(self, name: str, count: int, *, grow: bool | None = None) -> None:
        """Set a count; a rollout that goes on neither takes new pods away nor brings old ones back."""

        def size(current: int) -> int:
            return count if grow is None else max(current, count) if grow else min(current, count)

        await resize(self._api, name, size, self._fence)

    async def _ready(self, counts: Mapping[str, int]) -> None:
        """Wait until Deployments have so many ready pods and the gateways know them."""
        end = self._clock.now() + READY_TIMEOUT_S
        while not await asyncio.to_thread(self._has, counts):
            found = await asyncio.to_thread(self._workers)
            if crashed := [i for name in counts for i in found.get(name, ()) if i.state == "backoff"]:
                raise ConfigError(f"{crashed[0].id} crashes ({crashed[0].reason}); see its log")
            if self._clock.now() > end:
                raise DeadlineExceeded(f"{' and '.join(counts)}: not ready after {READY_TIMEOUT_S:g} s")
            await asyncio.sleep(self._poll_s)
        await asyncio.sleep(self._settle_s)

    def _has(self, counts: Mapping[str, int]) -> bool:
        found = deployments_of(self._api)
        return all(is_whole(found[name], count) for name, count in counts.items())


def is_whole(deployment: Body, count: int) -> bool:
    """Whether the controller has seen the last change of a Deployment and so many of its present pods are ready."""
    status = deployment.get("status", {})
    has_seen = int(status.get("observedGeneration", 0)) >= int(deployment["metadata"].get("generation", 0))
    return has_seen and min(int(status.get("readyReplicas", 0)), int(status.get("updatedReplicas", 0))) >= count


def is_pool(doc: Doc, role: str) -> bool:
    """Whether an object is the Deployment of a pool."""
    return doc["kind"] == "Deployment" and doc["metadata"]["name"] == role


def owner(item: Body) -> str:
    """Return the name of what controls an object; empty: nothing."""
    return next((str(o["name"]) for o in item["metadata"].get("ownerReferences", []) if o.get("controller")), "")


def beside(doc: Doc, want: Mapping[str, int]) -> Doc:
    """Return a pool's Deployment as the one that will stand beside it: one pod at first, then whatever it was sized to."""
    made = copy.deepcopy(dict(doc))
    annotations = {**made["metadata"].get("annotations", {}), WANT: json.dumps(dict(want))}
    made["metadata"] = {**made["metadata"], "name": new_name(str(doc["metadata"]["name"])), "annotations": annotations}
    # Not in what is applied, so that the command which goes on does not size it back.
    made["spec"].pop("replicas", None)
    return made


def sized(doc: Doc, want: Mapping[str, int]) -> Doc:
    """Return an object of the overlay with the size that its pool has now."""
    if not any(is_pool(doc, role) for role in want):
        return doc
    made = copy.deepcopy(dict(doc))
    made["spec"]["replicas"] = want[str(doc["metadata"]["name"])]
    return made
