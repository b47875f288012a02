"""Rules that every pod of ours must keep, as complaints about parsed manifests. Pure.

The reasons are public failures: pods that are ready before they can serve, probes that kill a busy worker, streams cut
by SIGTERM, service links read as settings, 64 MB of shared memory.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.cluster_description import GRACE_SLACK_S, PRE_STOP_S, ROLES

Doc = Mapping[str, Any]
ROLE = "tandem/role"
STARTUP_S = {"gateway": 60, "prefill": 3600, "decode": 3600}
"""At least: how long loading may take before the container is killed."""
SILENCE_S = {"gateway": 30, "prefill": 300, "decode": 300}
"""At least: how long a live process may be silent, e.g. while it compiles."""
TOLERATED_S = {"gateway": 10, "prefill": 30, "decode": 30}
"""At most: how long a pod stays bound to a node that is gone."""
_SIZES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "": 1}


def size_bytes(quantity: str) -> float:
    """Return a memory quantity in bytes; raises ValueError for one that is none."""
    number, unit = re.fullmatch(r"([0-9.]+)(Ki|Mi|Gi|Ti|)", str(quantity)).groups() if quantity else ("", "")  # type: ignore[union-attr]
    return float(number) * _SIZES[unit]


def pod_templates(docs: Sequence[Doc]) -> Iterator[tuple[str, str, Doc, Doc]]:
    """Yield (workload's name, role, pod spec, template) of everything that makes pods, custom resources included."""
    for doc in docs:
        for name, template in _templates(doc.get("spec"), f"{doc['kind']}/{doc['metadata']['name']}"):
            role = str(template.get("metadata", {}).get("labels", {}).get(ROLE, ""))
            yield name, role, template["spec"], template


def _templates(node: Any, name: str) -> Iterator[tuple[str, Doc]]:
    if isinstance(node, Mapping):
        if isinstance(node.get("spec"), Mapping) and "containers" in node["spec"]:
            yield name, node
            return
        for child in node.values():
            yield from _templates(child, name)
    elif isinstance(node, list):
        for child in node:
            yield from _templates(child, name)


def pod_complaints(docs: Sequence[Doc]) -> list[str]:
    """Return one sentence for every rule that a pod of these manifests breaks."""
    configs = {doc["metadata"]["name"]: doc.get("data", {}) for doc in docs if doc["kind"] == "ConfigMap"}
    found: list[str] = []
    for name, role, spec, _ in pod_templates(docs):
        if role not in {"gateway", "controller", *ROLES}:
            found.append(f"{name}: the pod has no label {ROLE} that we know")
            continue
        complaints = [*_identity(spec, role), *_volumes(spec), *_departure(spec, role, configs)]
        for container in spec["containers"]:
            complaints += [*_probes(container, role), *_resources(container, spec)]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            complaints += [*_rights(container), *_commands(container)]
        found += [f"{name}: {complaint}" for complaint in complaints]
    return found


def _identity(spec: Doc, role: str) -> Iterator[str]:
    if spec.get("enableServiceLinks") is not False:
        yield "enableServiceLinks must be false: names of services become variables otherwise"
    if spec.get("automountServiceAccountToken") is not (role == "controller"):
        yield "automountServiceAccountToken must be true for the controller and false elsewhere"
    for forbidden in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(forbidden):
            yield f"{forbidden} is not needed"
    security = spec.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "securityContext needs runAsNonRoot and seccompProfile RuntimeDefault"
    if role in ROLES and not spec.get("priorityClassName"):
        yield "priorityClassName is missing"
    limit = TOLERATED_S.get(role, 10)
    tolerated = {t.get("key"): t.get("tolerationSeconds", float("inf")) for t in spec.get("tolerations", [])}
    for key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"):
        if tolerated.get(key, float("inf")) > limit:
            yield f"a toleration of {key} for at most {limit} s is missing: the default is five minutes"


def _rights(container: Doc) -> Iterator[str]:
    context = container.get("securityContext", {})
    capabilities = context.get("capabilities", {})
    if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
        yield f"container {container['name']} must not be privileged nor able to become it"
    if context.get("readOnlyRootFilesystem") is not True:
        yield f"container {container['name']} must have a read-only root"
    if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {"IPC_LOCK"}:
        yield f"container {container['name']} must drop ALL capabilities and may add IPC_LOCK only"
    if container["image"].endswith(":latest") or not re.search(r"[:@]", container["image"]):
        yield f"image {container['image']} has no fixed tag"


def _commands(container: Doc) -> Iterator[str]:
    words = [*container.get("command", []), *container.get("args", [])]
    if any(word.rsplit("/", 1)[-1] in {"sh", "bash"} for word in words):
        yield f"container {container['name']} starts a shell, which keeps SIGTERM to itself"
    if any(re.search(r"(?i)(secret|token|password|api_key)=", word) for word in words):
        yield f"container {container['name']} has a secret among its arguments"


def _volumes(spec: Doc) -> Iterator[str]:
    for volume in spec.get("volumes", []):
        if "hostPath" in volume and volume["name"] != "models":
            yield f"volume {volume['name']} is a hostPath; only the node's cache of models may be one"
    mounts = {m["name"]: m for c in spec["containers"] for m in c.get("volumeMounts", [])}
    for name in ("models", "config", "secret"):
        if name in mounts and mounts[name].get("readOnly") is not True:
            yield f"volume {name} must be mounted read-only"


def _probes(container: Doc, role: str) -> Iterator[str]:
    for kind, path in (("startupProbe", "/startz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        probe = container.get(kind, {})
        if probe.get("httpGet", {}).get("path") != path:
            yield f"{kind} must ask {path}"
            continue
        if "initialDelaySeconds" in probe:
            yield f"{kind} has an initial delay: that is what the startup probe is for"
        if probe.get("timeoutSeconds", 1) < 2:
            yield f"{kind} must wait two seconds at least"
        total = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        least = {"startupProbe": STARTUP_S, "livenessProbe": SILENCE_S, "readinessProbe": {}}[kind].get(role, 0)
        if total < least:
            yield f"{kind} gives up after {total} s, but {least} s are usual"


def _resources(container: Doc, spec: Doc) -> Iterator[str]:
    requests = container.get("resources", {}).get("requests", {})
    limits = container.get("resources", {}).get("limits", {})
    if not {"cpu", "memory", "ephemeral-storage"} <= set(requests) or "memory" not in limits:
        yield "requests for cpu, memory and ephemeral-storage and a limit for memory are needed"
        return
    shared = [v["emptyDir"] for v in spec.get("volumes", []) if v.get("emptyDir", {}).get("medium") == "Memory"]
    for volume in shared:
        if size_bytes(volume.get("sizeLimit", "")) * 2 > size_bytes(limits["memory"]):
            yield "the memory volume needs a sizeLimit of at most half of the memory limit, in which it counts"
    if container["name"] in ROLES and not shared:
        yield "a worker needs a memory volume at /dev/shm: the default has 64 MB"


def _departure(spec: Doc, role: str, configs: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    if role == "controller":
        return
    container = spec["containers"][0]
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    if command[1:3] != ["-m", "deploy.leave"]:
        yield "preStop must run deploy.leave"
        return
    wait_s = float(command[command.index("--wait-s") + 1])
    if wait_s < PRE_STOP_S:
        yield f"preStop waits {wait_s:g} s, less than two membership TTLs ({PRE_STOP_S:g} s)"
    names = [v["configMap"]["name"] for v in spec.get("volumes", []) if "configMap" in v]
    texts = [text for name in names for text in configs.get(name, {}).values()]
    if not texts:
        yield "the configuration is not among the manifests"
        return
    drain_s = float(tomllib.loads(texts[0])["drain"]["budget_s"])
    grace_s = spec.get("terminationGracePeriodSeconds", 30)
    if grace_s < wait_s + drain_s + GRACE_SLACK_S:
        yield f"terminationGracePeriodSeconds {grace_s} is less than preStop {wait_s:g} + drain {drain_s:g} + {GRACE_SLACK_S:g}"
