"""What the gateways told at one moment, put together: traffic added up, every worker counted once. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.scaling_figures import OWN, WORKER


class GatewayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway process's answer. `incarnation` tells a restart, whose counters begin at zero again."""

    incarnation: str
    values: Mapping[str, float]


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, by its youngest report."""

    id: str
    facts: Mapping[str, float]

    def get(self, name: str) -> float:
        """Return a fact, 0 if it was not told."""
        return self.facts.get(name, 0.0)

    @property
    def is_prefill(self) -> bool:
        """Which pool it is in."""
        return bool(self.get("is_prefill"))


def workers_of(gateways: Sequence[GatewayFigures]) -> dict[str, WorkerFacts]:
    """Return every worker that any gateway knows; of two reports the younger one counts."""
    found: dict[str, WorkerFacts] = {}
    for gateway in gateways:
        told: dict[str, dict[str, float]] = {}
        for name, value in gateway.values.items():
            if name.startswith(WORKER):
                worker_id, _, fact = name.removeprefix(WORKER).rpartition("/")
                told.setdefault(worker_id, {})[fact] = value
        for worker_id, facts in told.items():
            known = found.get(worker_id)
            if known is None or facts.get("age_s", 0.0) < known.get("age_s"):
                found[worker_id] = WorkerFacts(id=worker_id, facts=facts)
    return found


def own(gateways: Sequence[GatewayFigures], name: str) -> float:
    """Return the sum of one of the gateways' own figures."""
    return sum(gateway.values.get(OWN + name, 0.0) for gateway in gateways)
