"""What a cluster description changes in the Kubernetes manifests: configuration files, sizes, grace periods.

Pure. Everything else stands in `deploy/k8s` as it is applied; Kustomize is the only templating.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from core.errors import ConfigError
from deploy.cluster_description import ROLES, ClusterDescription, PortsPart
from deploy.render_config import K8S, service_configs
from engine.models.builtin import BUILTIN_NAMES

BASE = Path(__file__).parent / "k8s"
SHM_GIB = 1
"""`sizeLimit` of /dev/shm: memory that counts in the limit of its pod."""
_KUSTOMIZATION = """\
# Yours: written once, never again. Add components and patches here; `tandem render` rewrites config/ and pools.yaml.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: tandem
resources:
  - {base}
{components}configMapGenerator:
  - {{name: gateway-config, behavior: replace, files: [config/gateway.toml]}}
  - {{name: prefill-config, behavior: replace, files: [config/prefill.toml]}}
  - {{name: decode-config, behavior: replace, files: [config/decode.toml]}}
  - {{name: controller-config, behavior: replace, files: [config/controller.toml]}}
patches:
  - path: pools.yaml
images:
  - {{name: localhost/tandem-gateway, newTag: dev}}
  - {{name: localhost/tandem-worker, newTag: dev}}
"""


def k8s_files(description: ClusterDescription, folder: Path) -> dict[str, str]:
    """Return the files of an overlay that will lie in `folder`; raises ConfigError for ports of its own."""
    if description.ports != PortsPart():
        raise ConfigError(
            "ports: on Kubernetes every pod has its own address, and manifests and network policies name the default "
            "ports; leave `ports` out, and choose the clients' port in the Service"
        )
    files = {f"config/{name}": text for name, text in service_configs(description, K8S).items()}
    files["pools.yaml"] = yaml.safe_dump_all(deployment_patches(description), sort_keys=False)
    base = os.path.relpath(BASE / "base", folder.resolve())
    component = os.path.relpath(BASE / "components" / "builtin-model", folder.resolve())
    is_builtin = description.model.path in BUILTIN_NAMES
    files["kustomization.yaml"] = _KUSTOMIZATION.format(
        base=base, components=f"components:\n  - {component}\n" if is_builtin else ""
    )
    return files


def deployment_patches(description: ClusterDescription) -> list[dict[str, object]]:
    """Return strategic merge patches of the gateway's and both pools' Deployments."""
    patches = [_patch(description, "gateway", description.gateway.replicas, {})]
    for role in ROLES:
        pool = description.pool(role)
        memory = f"{pool.memory_gib + SHM_GIB:g}Gi"
        gpus = {"nvidia.com/gpu": str(pool.gpus)} if pool.gpus else {}
        resources = {
            "requests": {"cpu": f"{pool.cpus:g}", "memory": memory, **gpus},
            "limits": {"memory": memory, **gpus},
        }
        patches.append(_patch(description, role, pool.replicas, resources))
    return patches


def prometheus_rule(rules: str) -> str:
    """Return rules of Prometheus as an object of its operator."""
    head = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata: {name: tandem}\nspec:\n"
    return head + "".join(f"  {line}\n" if line else "\n" for line in rules.splitlines())


def grace_period_s(description: ClusterDescription, role: str) -> int:
    """Return `terminationGracePeriodSeconds`: what a drain may take, rounded up to the next five seconds."""
    return -(-int(description.grace_s(role) + 0.999) // 5) * 5


def _patch(
    description: ClusterDescription, role: str, replicas: int, resources: Mapping[str, object]
) -> dict[str, object]:
    spec: dict[str, object] = {"terminationGracePeriodSeconds": grace_period_s(description, role)}
    if resources:
        spec["containers"] = [{"name": role, "resources": resources}]
    if description.model.path in BUILTIN_NAMES:
        spec["initContainers"] = [{"name": "model", "args": ["prepare", description.model.path, K8S.models]}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": role},
        "spec": {"replicas": replicas, "template": {"spec": spec}},
    }
