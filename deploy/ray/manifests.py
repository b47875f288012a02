"""Checks a manifest for Ray without a cluster: a RayCluster of KubeRay, or a description for `ray up`.

KubeRay's schema comes with its operator only, so a RayCluster is held against the fields that are used here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import yaml
from msgspec import Meta

from core.errors import ConfigError
from deploy.cluster_description import ROLES
from deploy.ray.factory import ray_up_check
from deploy.ray.plan import GATEWAY

AUTH = "RAY_AUTH_MODE"
"""Unset, a token file that an earlier Ray left in somebody's home decides."""
Count = Annotated[int, Meta(ge=0, le=4096)]


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Unknown fields are typing errors."""


class StartParams(Strict, frozen=True, kw_only=True, rename=None):
    """Flags of `ray start`: every value is a string."""

    resources: str
    num_cpus: str = msgspec.field(default="", name="num-cpus")
    num_gpus: str = msgspec.field(default="", name="num-gpus")
    labels: str = ""


class Group(Strict, frozen=True, kw_only=True):
    """Pods of one kind. `template` is a pod template of Kubernetes."""

    ray_start_params: StartParams
    template: dict[str, Any]


class WorkerGroup(Group, frozen=True, kw_only=True):
    """Worker pods."""

    group_name: Literal["prefill", "decode"]
    replicas: Count
    min_replicas: Count
    max_replicas: Count


class ClusterPart(Strict, frozen=True, kw_only=True):
    """`spec` of a RayCluster."""

    ray_version: str
    head_group_spec: Group
    worker_group_specs: tuple[WorkerGroup, ...]
    enable_in_tree_autoscaling: bool = False
    autoscaler_options: dict[str, Any] = {}
    auth_options: dict[Literal["mode"], Literal["token", "disabled"]] = {}


class RayClusterDoc(Strict, frozen=True, kw_only=True):
    """The whole document."""

    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: dict[str, Any]
    spec: ClusterPart


def check_manifest(path: Path) -> str:
    """Return what the file is; raises ConfigError with one sentence that names the file and what is wrong in it."""
    try:
        tree = cast("Mapping[str, Any]", yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    try:
        if tree.get("kind") == "RayCluster":
            _check_raycluster(msgspec.convert(tree, RayClusterDoc))
            return "RayCluster"
        ray_up_check()(tree)
        _check_commands(tree)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return "ray up"


def pod_templates(doc: RayClusterDoc) -> dict[str, dict[str, Any]]:
    """Return the pod templates by the name of their group."""
    return {
        "head": doc.spec.head_group_spec.template,
        **{g.group_name: g.template for g in doc.spec.worker_group_specs},
    }


def _check_raycluster(doc: RayClusterDoc) -> None:
    groups = {group.group_name: group for group in doc.spec.worker_group_specs}
    if set(groups) != set(ROLES):
        raise ConfigError(f"workerGroupSpecs are {sorted(groups)}, not one for each of {', '.join(ROLES)}")
    for name, group in {"head": doc.spec.head_group_spec, **groups}.items():
        role = GATEWAY if name == "head" else name
        # KubeRay hands the string to a shell: JSON inside of quotes that are part of the value.
        offered = msgspec.json.decode(
            msgspec.json.decode(group.ray_start_params.resources, type=str), type=dict[str, float]
        )
        if offered.get(role, 0) < 1:
            raise ConfigError(f"{name} offers no resource {role!r}, so no {role} finds room there")
    for group in groups.values():
        if not group.min_replicas <= group.replicas <= group.max_replicas:
            raise ConfigError(f"{group.group_name}: replicas is not between minReplicas and maxReplicas")
    for name, template in pod_templates(doc).items():
        for container in template["spec"]["containers"]:
            if AUTH not in {variable["name"] for variable in container.get("env", [])}:
                raise ConfigError(f"{name}: container {container['name']} does not set {AUTH}")


def _check_commands(tree: Mapping[str, Any]) -> None:
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        for line in cast("list[str]", tree[key]):
            if "ray start" in line and f"{AUTH}=" not in line:
                raise ConfigError(f"{key}: {line!r} does not set {AUTH}")
