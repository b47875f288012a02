"""Pairs on Kubernetes: one whole pair of one revision serves at any moment, whatever kills the command, and both ways end."""

import asyncio
import copy
import itertools
import json

import pytest

from core.clock import SystemClock
from core.errors import ConfigError
from deploy.actuators.api import StaleFence
from deploy.actuators.kubernetes import LEASE
from deploy.kubernetes_rollout import PairRollout, is_running

WANT = {"prefill": 2, "decode": 3}


class Killed(BaseException):
    """The command's process ends here."""


class Cluster:
    """Deployments, their ReplicaSets and pods, which are ready at once; every change is checked by `look`."""

    def __init__(self):
        self.deployments, self.sets, self.pods = {}, {}, {}
        self.numbers = itertools.count(1)
        self.lease = {"spec": {}}
        self.writes = 0
        self.killed_at = None
        self.broken = set()
        """Revisions whose pods crash."""
        self.look = lambda: None
        self.apply(revision("old"))

    # What a rollout asks.

    def get(self, path, query=None):
        if path == LEASE:
            return copy.deepcopy(self.lease)
        kind = path.partition(":")[2]
        if kind.endswith("/scale"):
            return {"name": kind.split("/")[1], "spec": {"replicas": self.deployments[kind.split("/")[1]]["replicas"]}}
        items = {"deployments": self.deployment_items, "replicasets": self.set_items, "pods": self.pod_items}[kind]()
        return {"items": items}

    def put(self, path, body):
        name = path.split("/")[-2]
        self.write()
        self.deployments[name]["replicas"] = body["spec"]["replicas"]
        self.reconcile()

    def apply(self, docs):
        for doc in docs:
            self.write()
            if doc["kind"] == "Deployment":
                spec = doc["spec"]
                self.deployments.setdefault(doc["metadata"]["name"], {"replicas": 1}).update(
                    {"template": spec["template"], "annotations": doc["metadata"].get("annotations", {})}
                    | ({"replicas": spec["replicas"]} if "replicas" in spec else {})
                )
                self.reconcile()

    def delete(self, deployment, *, keep_pods):
        self.write()
        if self.deployments.pop(deployment, None):
            for name in [n for n, s in self.sets.items() if s["owner"] == deployment]:
                self.sets[name]["owner"] = ""
                if not keep_pods:
                    self.pods = {p: s for p, s in self.pods.items() if s != name}
                    del self.sets[name]
        self.look()

    async def statusz(self, pod):
        return {"fingerprint": self.sets[self.pods[pod]]["template"]["fingerprint"]}

    # How it behaves.

    def write(self):
        self.writes += 1
        if self.writes == self.killed_at:
            raise Killed

    def reconcile(self):
        for name, deployment in self.deployments.items():
            same = [n for n, s in self.sets.items() if s["template"] == deployment["template"]]
            mine = (
                next((n for n in same if self.sets[n]["owner"] in {"", name}), None) or f"{name}-{next(self.numbers)}"
            )
            self.sets.setdefault(mine, {"template": deployment["template"]})["owner"] = name
            for other in [n for n, s in self.sets.items() if s["owner"] == name and n != mine]:
                self.pods = {p: s for p, s in self.pods.items() if s != other}
            have = [p for p, s in self.pods.items() if s == mine]
            for pod in have[deployment["replicas"] :]:
                del self.pods[pod]
            for _ in range(deployment["replicas"] - len(have)):
                self.pods[f"{mine}-{next(self.numbers)}"] = mine
        self.look()

    def ready(self, revision_, role):
        shapes = [self.sets[s]["template"] for s in self.pods.values()]
        return sum(t["revision"] == revision_ and t["role"] == role for t in shapes if revision_ not in self.broken)

    def deployment_items(self):
        made = []
        for name, deployment in self.deployments.items():
            count = sum(self.sets[s]["owner"] == name for s in self.pods.values())
            is_broken = deployment["template"]["revision"] in self.broken
            status = {"readyReplicas": 0 if is_broken else count, "updatedReplicas": count}
            metadata = {"name": name, "annotations": deployment["annotations"]}
            made.append({"metadata": metadata, "spec": {"replicas": deployment["replicas"]}, "status": status})
        return made

    def set_items(self):
        return [{"metadata": {"name": name, **owned_by(s["owner"])}} for name, s in self.sets.items()]

    def pod_items(self):
        crashed = {"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}
        well = {"conditions": [{"type": "Ready", "status": "True"}]}
        return [
            {
                "metadata": {"name": pod, **owned_by(name)},
                "status": crashed if self.sets[name]["template"]["revision"] in self.broken else well,
            }
            for pod, name in self.pods.items()
        ]


def owned_by(name):
    return {"ownerReferences": [{"name": name, "controller": True}]} if name else {}


def revision(name, **fingerprints):
    """What an overlay holds: settings, both pools, and something else."""
    docs = [{"kind": "ConfigMap", "metadata": {"name": f"prefill-config-{name}"}}]
    for role, count in WANT.items():
        template = {"revision": name, "role": role, "fingerprint": fingerprints.get(role, name)}
        docs.append(
            {"kind": "Deployment", "metadata": {"name": role}, "spec": {"replicas": count, "template": template}}
        )
    return [*docs, {"kind": "Service", "metadata": {"name": "gateway"}}]


def watched(cluster):
    """From now on: at any moment one revision has both roles, and no pool is smaller than it was."""

    def look():
        revisions = {s["template"]["revision"] for s in cluster.sets.values()}
        whole = [r for r in revisions if all(cluster.ready(r, role) for role in WANT)]
        assert whole, "no revision has both roles"
        for role, count in WANT.items():
            assert sum(cluster.ready(r, role) for r in revisions) >= count, f"{role} is below its size"

    cluster.look = look
    return cluster


def a_rollout(cluster, fence=0, said=None):
    report = [].append if said is None else said.append
    return PairRollout(cluster, SystemClock(), fence=fence, report=report, settle_s=0, poll_s=0)


def serves_alone(cluster, name):
    shapes = [cluster.sets[s]["template"] for s in cluster.pods.values()]
    return (
        {*cluster.deployments} == {*WANT}
        and all(t["revision"] == name for t in shapes)
        and {role: cluster.ready(name, role) for role in WANT} == WANT
    )


async def test_another_revision_comes_pair_by_pair_and_its_pods_stay_when_they_get_the_usual_names():
    cluster, said = watched(Cluster()), []
    await a_rollout(cluster, said=said).run(revision("new"))
    assert serves_alone(cluster, "new")
    assert all("-new-" in pod for pod in cluster.pods), "nothing was started after the last old worker had left"
    assert said[-1] == "the new revision serves alone"
    await a_rollout(cluster).run(revision("newer"))  # and so does the next one
    assert serves_alone(cluster, "newer")


async def test_pools_that_follow_one_another_are_the_negative_control():
    cluster = watched(Cluster())
    cluster.deployments["decode"]["template"] = {"revision": "new", "role": "decode", "fingerprint": "new"}
    with pytest.raises(AssertionError, match="no revision has both roles"):
        cluster.reconcile()


def writes_of_one():
    cluster = Cluster()
    before = cluster.writes
    asyncio.run(a_rollout(cluster).run(revision("new")))
    return range(before + 1, cluster.writes + 1)


@pytest.mark.parametrize("write", writes_of_one())
async def test_whatever_kills_the_command_the_next_one_ends_it(write):
    for command in ("run", "back"):
        cluster = watched(Cluster())
        cluster.killed_at = write
        with pytest.raises(Killed):
            await a_rollout(cluster).run(revision("new"))
        if command == "back" and is_running(cluster):
            try:
                await a_rollout(cluster).back("aborted")
            except ConfigError as error:
                assert "old workers are gone" in error.message  # noqa: PT017 - one of two right ends
            else:
                assert serves_alone(cluster, "old")
                continue
        try:
            await a_rollout(cluster).run(revision("new"))
        except ConfigError as error:
            # Killed between the two halves of the last renaming: the folder itself is the way on.
            assert "apply the folder" in error.message  # noqa: PT017 - as above
            cluster.apply(revision("new"))
        assert serves_alone(cluster, "new")


async def test_a_revision_that_crashes_is_taken_back_with_its_reason():
    cluster = watched(Cluster())
    cluster.broken = {"new"}
    with pytest.raises(ConfigError, match=r"went back: prefill-new-\S+ crashes \(CrashLoopBackOff\)"):
        await a_rollout(cluster).run(revision("new"))
    assert serves_alone(cluster, "old")


async def test_a_pair_that_would_never_be_paired_is_taken_back():
    cluster = watched(Cluster())
    with pytest.raises(ConfigError, match="different fingerprints"):
        await a_rollout(cluster).run(revision("new", decode="other"))
    assert serves_alone(cluster, "old")


async def test_a_command_that_another_one_replaced_changes_nothing_more():
    cluster = watched(Cluster())
    cluster.lease["spec"]["leaseTransitions"] = 4
    with pytest.raises(StaleFence):
        await a_rollout(cluster, fence=3).run(revision("new"))
    assert {role: cluster.ready("old", role) for role in WANT} == WANT
    await a_rollout(cluster, fence=4).back("aborted")
    assert serves_alone(cluster, "old")


async def test_a_rollout_that_was_not_begun_cannot_be_taken_back():
    with pytest.raises(ConfigError, match="no rollout is running"):
        await a_rollout(Cluster()).back("aborted")


async def test_a_folder_without_both_pools_is_refused():
    with pytest.raises(ConfigError, match="no Deployments prefill and decode"):
        await a_rollout(Cluster()).run([d for d in revision("new") if d["metadata"]["name"] != "decode"])


def test_the_size_at_the_beginning_is_kept_where_the_next_command_finds_it():
    cluster = Cluster()
    cluster.killed_at = cluster.writes + 3  # settings, first of the new pair
    with pytest.raises(Killed):
        asyncio.run(a_rollout(cluster).run(revision("new")))
    assert json.loads(cluster.deployments["prefill-new"]["annotations"]["tandem/rollout-want"]) == WANT
