"""What a gateway tells the controller: its own traffic, and the workers as it sees them. Plain numbers by name.

The controller adds the traffic of all gateways and counts each worker once, by the youngest report. Reads only.
"""

from core.lifecycle import State
from core.worker import Role
from gateway.admission import Admission
from gateway.directory import Directory, Member
from gateway.metrics import GatewayMetrics, total_of

OWN = "scale/"
"""Prefix of this gateway's own traffic: totals since its start, and what waits now."""
WORKER = "worker/"
"""Prefix of a worker's facts: ``worker/<id>/<fact>``."""


def scaling_figures(
    *, admission: Admission, metrics: GatewayMetrics, directory: Directory, now: float
) -> dict[str, float]:
    """Return all figures; counters restart with the process."""
    values = {
        f"{OWN}queued_samples": float(admission.queued),
        f"{OWN}in_flight_samples": float(admission.in_flight),
        f"{OWN}prompt_tokens_total": total_of(metrics.prompt_tokens),
        f"{OWN}cached_tokens_total": total_of(metrics.cached_tokens),
        f"{OWN}output_tokens_total": total_of(metrics.output_tokens),
        f"{OWN}pulled_bytes_total": total_of(metrics.bytes_pulled),
        f"{OWN}ended_samples_total": total_of(metrics.samples.metric),
    }
    for member in directory:
        for fact, value in _worker_facts(member, directory.ttl_s, now).items():
            values[f"{WORKER}{member.worker_id}/{fact}"] = value
    return values


def _worker_facts(member: Member, ttl_s: float, now: float) -> dict[str, float]:
    told, load = member.registration, member.load
    facts = {
        "is_prefill": float(told.role is Role.PREFILL),
        "age_s": max(0.0, now - (member.lease_until - ttl_s)),
        "kv_tokens": float(told.num_pages * told.page_tokens),
    }
    if load is not None:
        held = load.pages_total - load.pages_free - load.pages_evictable
        facts |= {
            "is_ready": float(load.state is State.READY),
            "kv_live_tokens": float(max(0, held) * told.page_tokens),
            "cached_tokens": float(load.pages_evictable * told.page_tokens),
            "waiting_tokens": float(load.waiting_tokens),
            "waiting_requests": float(load.waiting_requests),
            "running_requests": float(load.running_requests),
            "rows": float(load.rows_total),
            "rows_used": float(load.rows_used),
            "prefill_tokens_per_s": load.prefill_tokens_per_s,
            "step_s": load.step_ms / 1000.0,
            "kv_backlog_bytes": float(load.kv_backlog_bytes),
            "kv_bytes_per_s": load.kv_bytes_per_s,
        }
    return facts
