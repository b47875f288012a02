"""An API server for two Deployments in memory: counts, pods and a lease, with the ReplicaSet's order of deletion."""

import copy
import itertools

from core.errors import ConfigError
from deploy.actuators.kubernetes_api import Conflict

LEASE = "apis/coordination.k8s.io/v1:leases/tandem-controller"


class FakeKubernetesApi:
    """Pods become ready at once and are gone as soon as they are deleted, unless `lingering`."""

    def __init__(self):
        self.counts = {"prefill": 0, "decode": 0}
        self.versions = itertools.count(1)
        self.version = {"prefill": "0", "decode": "0", "lease": "0"}
        self.pods = {}
        self.lease = {"metadata": {"name": "tandem-controller", "resourceVersion": "0"}, "spec": {}}
        self.numbers = itertools.count(1)
        self.deleted = []
        self.honours_cost = True
        self.starts_ready = True
        self.before_put = None
        """Called before each write: another writer's chance."""

    async def drain(self, pod):
        self.pods[pod["metadata"]["name"]]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]

    def get(self, path, query=None):
        if path == LEASE:
            return copy.deepcopy(self.lease)
        if path == "api/v1:pods":
            return {"items": copy.deepcopy([self.pods[name] for name in sorted(self.pods)])}
        role = path.split("/")[-2]
        return {
            "metadata": {"name": role, "resourceVersion": self.version[role]},
            "spec": {"replicas": self.counts[role]},
        }

    def put(self, path, body):
        if self.before_put is not None:
            hook, self.before_put = self.before_put, None
            hook()
        if path == LEASE:
            if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                raise Conflict("the lease")
            self.lease = copy.deepcopy(body)
            self.lease["metadata"]["resourceVersion"] = str(next(self.versions))
            return body
        role = path.split("/")[-2]
        if body["metadata"]["resourceVersion"] != self.version[role]:
            raise Conflict(role)
        self.resize(role, body["spec"]["replicas"])
        return body

    def patch(self, path, body):
        name = path.rpartition("/")[2]
        if name not in self.pods:
            raise ConfigError(f"Kubernetes refuses PATCH pods/{name} (404): not found")
        self.pods[name]["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
        return self.pods[name]

    def resize(self, role, count):
        self.counts[role] = count
        self.version[role] = str(next(self.versions))
        while len(mine := [p for p in self.pods.values() if p["metadata"]["labels"]["tandem/role"] == role]) < count:
            self.add(role)
        for pod in sorted(mine, key=self.rank)[: len(mine) - count]:
            self.deleted.append(pod["metadata"]["name"])
            del self.pods[pod["metadata"]["name"]]

    def rank(self, pod):
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
        cost = int(pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost", 0))
        # Not ready first, then the cheaper, then the youngest: the one that the caller would not guess.
        return ready, cost if self.honours_cost else 0, -int(pod["metadata"]["name"].rpartition("-")[2])

    def add(self, role):
        number = next(self.numbers)
        self.pods[f"{role}-{number}"] = {
            "metadata": {"name": f"{role}-{number}", "labels": {"tandem/role": role, "tandem/slice": "0"}},
            "spec": {"containers": [{"name": role, "ports": [{"name": "metrics", "containerPort": 9400}]}]},
            "status": {
                "phase": "Running",
                "podIP": f"10.0.0.{number}",
                "conditions": [{"type": "Ready", "status": str(self.starts_ready)}],
            },
        }
