"""A gauge per worker and fact, with a bound on how many workers are shown by name. Knows no logic."""

from collections.abc import Iterable

from prometheus_client import Gauge

from core.clock import Clock
from core.lifecycle import State
from core.metrics import Metrics
from gateway.directory import Member

MAX_SHOWN = 200
"""Workers shown by name; in a larger fleet the first of them by name, for series cost every scrape."""
_FACTS = {
    "up": "1 if it may get work.",
    "running_requests": "Requests in its batch.",
    "waiting_requests": "Requests in its queue.",
    "waiting_tokens": "Prompt tokens that it has not computed yet.",
    "free_pages": "KV pages free or evictable.",
    "step_seconds": "Its last step.",
    "heartbeat_age_seconds": "Since its last report.",
    "breaker_failures": "Consecutive failures that its breaker counts.",
}


class WorkerGauges:
    """`tandem_gateway_worker_<fact>{worker, role}`."""

    def __init__(self, metrics: Metrics) -> None:
        self._gauges: dict[str, Gauge] = {
            fact: metrics.gauge(f"tandem_gateway_worker_{fact}", f"A worker: {text}", {"worker": (), "role": ()})
            for fact, text in _FACTS.items()
        }
        self._shown: set[tuple[str, str]] = set()

    def show(self, members: Iterable[tuple[Member, bool]], clock: Clock, ttl_s: float) -> None:
        """Show these members, each with whether it may get work, and forget those that are gone."""
        now = clock.now()
        shown: set[tuple[str, str]] = set()
        for member, is_up in sorted(members, key=lambda pair: pair[0].worker_id)[:MAX_SHOWN]:
            labels = (member.worker_id, member.registration.role.value)
            shown.add(labels)
            for fact, value in _values(member, is_up, now - (member.lease_until - ttl_s)).items():
                self._gauges[fact].labels(*labels).set(value)
        for labels in self._shown - shown:
            for gauge in self._gauges.values():
                gauge.remove(*labels)
        self._shown = shown


def _values(member: Member, is_up: bool, heartbeat_age_s: float) -> dict[str, float]:
    load = member.load
    values = {
        "up": float(is_up and load is not None and load.state is State.READY),
        "heartbeat_age_seconds": max(0.0, heartbeat_age_s),
        "breaker_failures": float(member.breaker.failures),
    }
    if load is not None:
        values |= {
            "running_requests": float(load.running_requests),
            "waiting_requests": float(load.waiting_requests),
            "waiting_tokens": float(load.waiting_tokens),
            "free_pages": float(load.pages_free + load.pages_evictable),
            "step_seconds": load.step_ms / 1000.0,
        }
    return values
