"""What network policies mean: the table of who may open a connection to whom, derived from manifests. Pure.

A connection is allowed if the policies of the one who opens it and of the one who takes it both allow it, which is how
policy agents read them. Pods are known by their role label; `client` and `monitoring` stand for what is outside.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.cluster_description import PortsPart
from deploy.validate_pods import ROLE

Doc = Mapping[str, Any]
Pair = tuple[str, str, int]
"""(who opens, who takes, TCP port)"""
INSIDE = ("gateway", "prefill", "decode", "controller")
OUTSIDE = {"client": "tandem/client", "monitoring": "tandem/monitoring"}


def needed_pairs(ports: PortsPart) -> frozenset[Pair]:
    """Return the connections that a cluster opens: no fewer, so that it works, and no more, so that it is closed."""
    joining = {(role, "gateway", ports.membership) for role in ("prefill", "decode", "controller")}
    work = {("gateway", role, ports.worker) for role in ("prefill", "decode")}
    handover = {("decode", "prefill", ports.worker), ("decode", "prefill", ports.transfer)}
    drains = {("controller", role, ports.worker) for role in ("prefill", "decode")}
    scrapes = {("monitoring", role, ports.metrics) for role in INSIDE}
    return frozenset({("client", "gateway", ports.http), *joining, *work, *handover, *drains, *scrapes})


def allowed_pairs(docs: Sequence[Doc]) -> frozenset[Pair]:
    """Return the connections between roles, clients and monitoring that the NetworkPolicies allow."""
    policies = [doc["spec"] for doc in docs if doc["kind"] == "NetworkPolicy"]
    wanted = {port for policy in policies for port in _ports(policy)} | {port for *_, port in needed_pairs(PortsPart())}
    return frozenset(
        (source, target, port)
        for target in INSIDE
        for source in (*INSIDE, *OUTSIDE)
        for port in wanted
        if source != target
        and _side(policies, target, source, port, "ingress")
        and (source in OUTSIDE or _side(policies, source, target, port, "egress"))
    )


def network_complaints(docs: Sequence[Doc], ports: PortsPart) -> list[str]:
    """Return one sentence for every connection that is missing or too much."""
    allowed, needed = allowed_pairs(docs), needed_pairs(ports)
    missing = [f"no policy lets {a} reach {b} at {port}" for a, b, port in sorted(needed - allowed)]
    open_ = [f"policies let {a} reach {b} at {port}, which nothing needs" for a, b, port in sorted(allowed - needed)]
    return missing + open_


def _ports(policy: Doc) -> Iterator[int]:
    for rule in [*policy.get("ingress", []), *policy.get("egress", [])]:
        for port in rule.get("ports", []):
            if isinstance(port.get("port"), int) and port.get("protocol", "TCP") == "TCP":
                yield port["port"]


def _side(policies: Sequence[Doc], subject: str, peer: str, port: int, side: str) -> bool:
    """Whether the policies that select `subject` allow the peer on one side; no policy at all allows everything."""
    chosen = [p for p in policies if side.capitalize() in p["policyTypes"] and _selects(p["podSelector"], subject)]
    rules = [rule for policy in chosen for rule in policy.get(side, [])]
    key = "from" if side == "ingress" else "to"
    return not chosen or any(
        (key not in rule or any(_matches(entry, peer) for entry in rule[key]))
        and ("ports" not in rule or any(p.get("port") == port for p in rule["ports"]))
        for rule in rules
    )


def _selects(selector: Doc, role: str) -> bool:
    labels = selector.get("matchLabels", {})
    return not labels or labels.get(ROLE) == role


def _matches(entry: Doc, peer: str) -> bool:
    """Whether one peer of a rule is `peer`: inside by role, outside by the label that stands for it."""
    labels = {
        **entry.get("namespaceSelector", {}).get("matchLabels", {}),
        **entry.get("podSelector", {}).get("matchLabels", {}),
    }
    if peer in OUTSIDE:
        return "namespaceSelector" in entry and set(labels) <= {OUTSIDE[peer]}
    return "namespaceSelector" not in entry and (not labels or labels.get(ROLE) == peer)
