"""Which worker leaves when a pool shrinks: the one that loses least. Pure."""

from collections.abc import Mapping, Sequence

from deploy.actuators.api import Instance
from deploy.controller.figures import WorkerFacts


def choose_victim(role: str, instances: Sequence[Instance], workers: Mapping[str, WorkerFacts]) -> str | None:
    """Return the id to drain: least live KV, then fewest cached tokens, never the last of its domain if another can go.

    A worker that told nothing counts as loaded: silence is no proof of idleness. None if nobody may leave.
    """
    pool = [i for i in instances if i.role == role and i.state not in {"draining", "gone"}]
    if len(pool) < 2:
        return None
    members: dict[str, int] = {}
    for instance in pool:
        members[instance.domain] = members.get(instance.domain, 0) + 1

    def loss(instance: Instance) -> tuple[bool, bool, float, float, str]:
        facts = workers.get(instance.id)
        is_last = len(members) > 1 and members[instance.domain] == 1
        is_silent = facts is None and instance.state != "held"
        live = facts.get("kv_live_tokens") + facts.get("waiting_tokens") if facts else 0.0
        return is_last, is_silent, live, facts.get("cached_tokens") if facts else 0.0, instance.id

    return min(pool, key=loss).id
