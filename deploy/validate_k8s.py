"""Checks a Kubernetes overlay without a cluster: builds it, then asks for rules, network pairs and disruption budgets.

`complaints` is pure; `build` runs kubectl's own Kustomize. Schemas are checked by the tests with published ones.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from core.errors import ConfigError
from deploy.cluster_description import ROLES, PortsPart
from deploy.validate_network import network_complaints
from deploy.validate_pods import ROLE, pod_complaints

Doc = Mapping[str, Any]
BUILD_TIMEOUT_S = 60.0


def build(folder: Path, kubectl: str = "kubectl") -> list[Doc]:
    """Return the objects that an overlay applies; raises ConfigError with what Kustomize says."""
    try:
        done = subprocess.run(
            [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{kubectl} is not installed; install kubectl 1.29 or newer") from error
    if done.returncode:
        raise ConfigError(f"{folder} cannot be built: {done.stderr.strip()}")
    return cast("list[Doc]", [doc for doc in yaml.safe_load_all(done.stdout) if doc])


def complaints(docs: Sequence[Doc]) -> list[str]:
    """Return one sentence for every rule that the manifests break; empty: nothing to say."""
    return [*pod_complaints(docs), *network_complaints(docs, PortsPart()), *_disruption(docs), *_rollout(docs)]


def _workloads(docs: Sequence[Doc]) -> dict[str, Doc]:
    return {
        str(doc["spec"]["selector"]["matchLabels"].get(ROLE, "")): cast("Doc", doc["spec"])
        for doc in docs
        if doc["kind"] == "Deployment"
    }


def _disruption(docs: Sequence[Doc]) -> list[str]:
    """A budget for each role with more than one pod; none that forbids every eviction."""
    budgets = {
        str(doc["spec"]["selector"]["matchLabels"].get(ROLE, "")): cast("Doc", doc["spec"])
        for doc in docs
        if doc["kind"] == "PodDisruptionBudget"
    }
    found: list[str] = []
    for role, spec in _workloads(docs).items():
        replicas, budget = int(spec.get("replicas", 1)), budgets.get(role)
        if budget is None:
            if role in ROLES or replicas > 1:
                found += [f"{role} has {replicas} pods and no PodDisruptionBudget"] if role != "controller" else []
        elif int(budget.get("minAvailable", 0)) >= replicas:
            found.append(
                f"the PodDisruptionBudget of {role} keeps {replicas} of {replicas} pods: no node can be drained"
            )
        elif int(budget.get("maxUnavailable", 1)) != 1:
            found.append(f"the PodDisruptionBudget of {role} must let one leave at a time")
    return found


def _rollout(docs: Sequence[Doc]) -> list[str]:
    """Gateways and decode workers are replaced before they leave."""
    found: list[str] = []
    for role, spec in _workloads(docs).items():
        rolling = spec.get("strategy", {}).get("rollingUpdate", {})
        if role in {"gateway", "decode"} and rolling.get("maxUnavailable") != 0:
            found.append(f"{role} needs maxUnavailable 0: the last one must not leave before its successor is ready")
    return found
