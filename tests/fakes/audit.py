"""Page audits of a running cluster, through the workers' Admin service."""

import asyncio

from core.ids import fresh_incarnation
from core.rpc.admin import AdminClient, Statistics
from core.rpc.proof import Proof

IDLE_NAMES = {
    "transfer_leases",
    "transfer_open_ops",
    "transfer_transfers",
    "worker_requests_live",
    "worker_sequences_bound",
}
"""Statistics besides pages that are 0 in an idle worker."""


def statistics(cluster, audit: bool = True) -> dict[str, Statistics]:
    """Return the statistics of every ready worker by id."""
    secret = (cluster.run_dir / "secret").read_text().strip().encode()
    client = AdminClient(Proof(secret, fresh_incarnation()))

    async def ask() -> dict[str, Statistics]:
        return {
            p["id"]: await client.statistics(p["address"], audit=audit)
            for p in cluster.processes()
            if p["role"] != "gateway" and p["state"] == "ready"
        }

    return asyncio.run(ask())


def held_pages(cluster) -> int:
    """Pages that belong to a live sequence or transfer, over all workers."""
    names = ("private", "landing", "unproven", "fenced", "loading")
    return int(
        sum(s.values[f"engine_pages_{name}"] for s in statistics(cluster, audit=False).values() for name in names)
    )


def findings(cluster) -> list[str]:
    """Everything that an idle cluster's audits find wrong: invariants, held pages, leases, open operations."""
    found = []
    for worker, stats in statistics(cluster).items():
        found += [f"{worker}: {text}" for text in stats.audit_findings]
        for name, value in stats.values.items():
            idle = name.startswith("engine_pages_") and name.split("_")[-1] in {
                "private",
                "landing",
                "unproven",
                "fenced",
                "loading",
            }
            if (idle or name in IDLE_NAMES) and value:
                found.append(f"{worker}: {name} is {value:.0f}, should be 0 when idle")
    return found


def gateway_findings(cluster) -> list[str]:
    """Everything that an idle gateway still counts: permits, handles, work at workers."""
    secret = (cluster.run_dir / "secret").read_text().strip().encode()
    client = AdminClient(Proof(secret, fresh_incarnation()))
    (gateway,) = cluster.processes("gateway")
    stats = asyncio.run(client.statistics(gateway["membership_address"], audit=True))
    names = ("in_flight", "queued", "open_handles", "own_tokens", "own_requests")
    held = [f"gateway: {name} is {stats.values[name]:g}" for name in names if stats.values[name]]
    return [f"gateway: {text}" for text in stats.audit_findings] + held
