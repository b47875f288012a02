"""A15 and A16: each rule about pods, disruption and network can fail: a planted fault is found and named."""

import copy
import dataclasses
import tomllib

import pytest

from core.config import load
from decode_worker.config import DecodeWorkerConfig
from deploy.cluster_description import GRACE_SLACK_S, PRE_STOP_S, PortsPart, read_description
from deploy.controller.config import ControllerConfig
from deploy.validate_k8s import complaints
from deploy.validate_network import allowed_pairs, needed_pairs
from gateway.config import GatewayConfig
from prefill_worker.config import PrefillWorkerConfig
from tests.deploy.overlays import K8S, OVERLAYS, overlay


def pick(docs, kind, name):
    return next(d for d in docs if d["kind"] == kind and d["metadata"]["name"] == name)


def pod(docs, role):
    return pick(docs, "Deployment", role)["spec"]["template"]["spec"]


def at(value, *path):
    """Set (or, with None, remove) a field of a pod's first container."""

    def fault(docs, role="decode"):
        node = pod(docs, role)
        for key in path[:-1]:
            node = node[key]
        if value is None:
            node.pop(path[-1])
        else:
            node[path[-1]] = value

    return fault


C = ("containers", 0)


@dataclasses.dataclass
class Fault:
    said: str
    plant: object


def shell(docs):
    pod(docs, "decode")["containers"][0]["command"] = ["/bin/sh", "-c", "tandem decode"]


def secret(docs):
    pod(docs, "decode")["containers"][0]["args"].append("--secret=abc")


def host_path(docs):
    pod(docs, "decode")["volumes"].append({"name": "any", "hostPath": {"path": "/"}})


def long_drain(docs):
    config = next(d for d in docs if d["kind"] == "ConfigMap" and d["metadata"]["name"].startswith("decode-config"))
    config["data"]["decode.toml"] = config["data"]["decode.toml"].replace("budget_s = 600.0", "budget_s = 900.0")


def no_budget(docs):
    docs.remove(pick(docs, "PodDisruptionBudget", "decode"))


def wedged(docs):
    pick(docs, "PodDisruptionBudget", "gateway")["spec"]["minAvailable"] = 2


def last_leaves(docs):
    pick(docs, "Deployment", "decode")["spec"]["strategy"]["rollingUpdate"] = {"maxSurge": 0, "maxUnavailable": 1}


def unlabelled(docs):
    del pick(docs, "Deployment", "decode")["spec"]["template"]["metadata"]["labels"]["tandem/role"]


def no_transfer(docs):
    pick(docs, "NetworkPolicy", "prefill")["spec"]["ingress"][1]["ports"].pop()


def no_deny(docs):
    docs[:] = [d for d in docs if d["kind"] != "NetworkPolicy"]


def open_worker(docs):
    rule = {"from": [{"podSelector": {}}], "ports": [{"port": 9600}]}
    pick(docs, "NetworkPolicy", "decode")["spec"]["ingress"].append(rule)
    pick(docs, "NetworkPolicy", "prefill")["spec"]["egress"].append(
        {"to": [{"podSelector": {}}], "ports": [{"port": 9600}]}
    )


FAULTS = {
    "service links": Fault("enableServiceLinks", at(None, "enableServiceLinks")),
    "a token in a worker": Fault("automountServiceAccountToken", at(True, "automountServiceAccountToken")),
    "the host's network": Fault("hostNetwork", at(True, "hostNetwork")),
    "root": Fault("runAsNonRoot", at({}, "securityContext")),
    "no priority": Fault("priorityClassName", at(None, "priorityClassName")),
    "the default toleration": Fault("five minutes", at([], "tolerations")),
    "privileged": Fault("privileged", at(True, *C, "securityContext", "privileged")),
    "a writable root": Fault("read-only root", at(False, *C, "securityContext", "readOnlyRootFilesystem")),
    "a capability": Fault("IPC_LOCK only", at(["SYS_ADMIN"], *C, "securityContext", "capabilities", "add")),
    "a floating tag": Fault("no fixed tag", at("tandem:latest", *C, "image")),
    "a shell": Fault("keeps SIGTERM", shell),
    "a secret argument": Fault("secret among its arguments", secret),
    "a host path": Fault("hostPath", host_path),
    "no startup probe": Fault("startupProbe must ask /startz", at(None, *C, "startupProbe")),
    "ready when the port is open": Fault("readinessProbe", at({"tcpSocket": {"port": 1}}, *C, "readinessProbe")),
    "an initial delay": Fault("initial delay", at(60, *C, "startupProbe", "initialDelaySeconds")),
    "a short probe": Fault("two seconds", at(1, *C, "readinessProbe", "timeoutSeconds")),
    "an impatient liveness": Fault("300 s are usual", at(1, *C, "livenessProbe", "failureThreshold")),
    "a short load": Fault("3600 s are usual", at(10, *C, "startupProbe", "failureThreshold")),
    "no limit": Fault("limit for memory", at({}, *C, "resources", "limits")),
    "64 MB of shared memory": Fault("64 MB", at([], "volumes")),
    "no preStop": Fault("deploy.leave", at(None, *C, "lifecycle")),
    "a short grace": Fault("terminationGracePeriodSeconds 30", at(30, "terminationGracePeriodSeconds")),
    "a longer drain": Fault("drain 900", long_drain),
    "no budget": Fault("no PodDisruptionBudget", no_budget),
    "a wedged node": Fault("no node can be drained", wedged),
    "the last one leaves": Fault("maxUnavailable 0", last_leaves),
    "no role": Fault("no label", unlabelled),
    "no way for KV": Fault("no policy lets decode reach prefill at 9700", no_transfer),
    "no policy at all": Fault("which nothing needs", no_deny),
    "a way too much": Fault("prefill reach decode at 9600, which nothing needs", open_worker),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_is_named(name):
    docs = copy.deepcopy(list(overlay("base")))
    assert complaints(docs) == []
    FAULTS[name].plant(docs)
    assert any(FAULTS[name].said in complaint for complaint in complaints(docs)), complaints(docs)


def test_the_policies_allow_exactly_what_a_cluster_uses():
    assert allowed_pairs(overlay("base")) == needed_pairs(PortsPart())


def tables(name):
    """What an overlay's configuration files say, role by role, read as the processes read them."""
    kinds = {
        "gateway": GatewayConfig,
        "prefill": PrefillWorkerConfig,
        "decode": DecodeWorkerConfig,
        "controller": ControllerConfig,
    }
    folder = K8S / ("base" if name == "base" else f"overlays/{name}")
    return {role: load(kind, folder / "config" / f"{role}.toml") for role, kind in kinds.items()}


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_manifests_configuration_and_description_agree(name):
    folder = K8S / ("base" if name == "base" else f"overlays/{name}")
    said, docs, read = read_description(folder / "cluster.yaml"), overlay(name), tables(name)
    ports = said.ports
    expected = {
        "gateway": {"http": ports.http, "membership": ports.membership, "metrics": ports.metrics},
        "controller": {"metrics": ports.metrics},
        **dict.fromkeys(
            ("prefill", "decode"), {"worker": ports.worker, "transfer": ports.transfer, "metrics": ports.metrics}
        ),
    }
    for role, wanted in expected.items():
        container = pod(docs, role)["containers"][0]
        assert {p["name"]: p["containerPort"] for p in container["ports"]} == wanted
    assert (read["gateway"].http.port, read["gateway"].membership.port, read["gateway"].listener.port) == (
        ports.http,
        ports.membership,
        ports.metrics,
    )
    for role in ("prefill", "decode"):
        config = read[role]
        assert (config.worker.port, config.transfer.port, config.worker.http_port) == (
            ports.worker,
            ports.transfer,
            ports.metrics,
        )
        assert config.worker.gateways == (f"dns:gateway-members:{ports.membership}",)
        assert pick(docs, "Deployment", role)["spec"]["replicas"] == said.pool(role).replicas
    assert pick(docs, "Service", "gateway-members")["spec"]["clusterIP"] == "None"
    for role in ("gateway", "prefill", "decode"):
        assert read[role].drain.budget_s == said.drain_s(role)
        grace = pod(docs, role)["terminationGracePeriodSeconds"]
        assert PRE_STOP_S + said.drain_s(role) + GRACE_SLACK_S <= grace <= said.grace_s(role) + 5
    rules = read["controller"].autoscale
    assert (rules.budget, rules.ttft_s, rules.tpot_s) == (said.budget.workers, said.slo.ttft_s, said.slo.tpot_s)
    assert (rules.prefill_maximum, rules.decode_maximum) == (said.prefill.maximum, said.decode.maximum)
    assert read["controller"].controller.advisory is not said.budget.autoscale


def test_the_controller_may_size_the_two_pools_and_nothing_else():
    rules = pick(overlay("base"), "Role", "tandem-controller")["rules"]
    assert {(r["resources"][0], tuple(r.get("resourceNames", ())), tuple(r["verbs"])) for r in rules} == {
        ("deployments/scale", ("prefill", "decode"), ("get", "update")),
        ("pods", (), ("list", "patch")),
        ("leases", ("tandem-controller",), ("get", "update")),
    }


def test_a_changed_setting_renames_its_configuration_only():
    """The hash in a ConfigMap's name is what makes a change a rolling update of that role."""
    names = {r: next(v["configMap"]["name"] for v in pod(overlay("ci"), r)["volumes"] if "configMap" in v) for r in ("prefill", "decode")}  # fmt: skip
    other = {r: next(v["configMap"]["name"] for v in pod(overlay("base"), r)["volumes"] if "configMap" in v) for r in ("prefill", "decode")}  # fmt: skip
    assert all(names[r] != other[r] and names[r].startswith(f"{r}-config-") for r in names)


def test_the_configurations_hold_no_secret():
    for name in ("base", *OVERLAYS):
        for doc in overlay(name):
            assert doc["kind"] != "Secret"
            for text in doc.get("data", {}).values() if doc["kind"] == "ConfigMap" else ():
                if text.startswith(("[", "id")):
                    assert "secret" not in {k for k in tomllib.loads(text) if k != "secret_file"}
