"""What the actors of one cluster are told: the cluster, what a worker of each role needs of its host, where gateways meet.

Pure. Pickled between Ray's processes; the part that outlives a controller is JSON.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from core.errors import ConfigError
from deploy.cluster_description import ROLES, ClusterDescription
from deploy.local.described import spec_of
from deploy.local.spec import ClusterSpec, Revision

DOMAIN_LABEL = "tandem/domain"
"""Label of a Ray node: its network domain (slice, rack). Workers register with it."""
GATEWAY = "gateway"
"""Custom resources are named like the roles: a node that offers ``prefill: 4`` holds four prefill workers."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker takes from its host, beside one unit of its role's resource."""

    cpus: float = 1.0
    gpus: int = 0
    memory_gib: float = 0.0
    """0: not counted."""
    nodes: int = 1
    """More than one: a placement group with one bundle on each of so many hosts; the worker runs in the first."""


class RayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster on Ray."""

    spec: ClusterSpec
    needs: Mapping[str, Needs]
    slices: int = 1
    """Domains over which the workers of each role are spread."""
    membership_port: int = 9500
    """Of the first gateway; the one that replaces it in a rollout takes the next."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted controller must know and no supervisor can tell."""

    epoch: int
    """Grows with every start of a controller: the fence of its orders."""
    revision: int
    spec: ClusterSpec
    model: str
    want: Mapping[str, int]
    secret: str
    membership: Sequence[str]
    http_port: int
    names: Sequence[str]
    """Of processes that may run; one that no supervisor knows any more may drain for a while."""

    def the_revision(self) -> Revision:
        """Return what processes are started from."""
        return Revision(number=self.revision, spec=self.spec, model_dir=Path(self.model))


def plan_of(spec: ClusterSpec, description: ClusterDescription | None) -> RayPlan:
    """Combine a cluster (flags over the file) and what only the file says; raises ConfigError."""
    if description is None:
        return RayPlan(spec=spec, needs={role: Needs() for role in ROLES})
    needs = {
        role: Needs(cpus=pool.cpus, gpus=pool.gpus, memory_gib=pool.memory_gib, nodes=pool.nodes)
        for role, pool in ((role, description.pool(role)) for role in ROLES)
    }
    return RayPlan(
        spec=spec, needs=needs, slices=description.slices, membership_port=description.ports.membership or 9500
    )


def spec_on_hosts(description: ClusterDescription) -> ClusterSpec:
    """Return the cluster of a description whose workers may span hosts and domains; raises ConfigError."""
    one = {role: msgspec.structs.replace(description.pool(role), nodes=1) for role in ROLES}
    spec = spec_of(msgspec.structs.replace(description, slices=1, **one))
    # A gateway process per replica is a matter of one host; here one gateway serves.
    return msgspec.structs.replace(
        spec, transfer="tcp" if spec.transfer == "auto" and description.slices > 1 else spec.transfer
    )


def missing_resources(plan: RayPlan, offered: Mapping[str, float]) -> str:
    """Return one sentence that names the roles that no node of the Ray cluster takes; empty if there is none.

    Too few are no fault: Ray's autoscaler may add nodes for supervisors that find no room.
    """
    wanted = {GATEWAY: 1, "prefill": plan.spec.prefill, "decode": plan.spec.decode}
    missing = {role: n for role, n in wanted.items() if n and not offered.get(role)}
    if not missing:
        return ""
    flag = msgspec.json.encode(missing).decode()
    return f"no node of the Ray cluster takes {', '.join(missing)}; start one with: ray start --resources '{flag}'"


def check_domains(domains: Sequence[str], slices: int) -> None:
    """Raise ConfigError if nodes name fewer domains than the cluster has slices."""
    known = len(set(domains))
    if slices > 1 and known < slices:
        raise ConfigError(
            f"the cluster has {slices} slices, but nodes of {known} have the label {DOMAIN_LABEL}; "
            f"start nodes with: ray start --labels {DOMAIN_LABEL}=NAME"
        )


def choose_domain(domains: Sequence[str], taken: Sequence[str], slices: int) -> str:
    """Return the domain of live nodes with the fewest workers of a role (`taken`: one entry a worker); empty: any host.

    A cluster that has begun makes do with fewer domains than slices: one may be gone.
    """
    if slices == 1:
        return ""
    return min(sorted(set(domains))[:slices], key=lambda domain: (taken.count(domain), domain), default="")


def encode_saved(saved: Saved) -> bytes:
    """Return the JSON of it."""
    return msgspec.json.encode(saved)


def decode_saved(data: bytes) -> Saved:
    """Read the JSON of it."""
    return msgspec.json.decode(data, type=Saved)


def nodes_facts(nodes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """Return the resources that live nodes offer in total and the domains that they name (`ray.nodes()`)."""
    total: dict[str, float] = {}
    domains: list[str] = []
    for node in nodes:
        if not node["Alive"]:
            continue
        for name, amount in cast("Mapping[str, float]", node["Resources"]).items():
            total[name] = total.get(name, 0.0) + amount
        domain = cast("Mapping[str, str]", node.get("Labels") or {}).get(DOMAIN_LABEL)
        domains += [domain] if domain else []
    return total, domains
