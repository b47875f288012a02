"""Counters of the last half minute as the autoscaler's signals. Pure: times and figures in, `Signals` out.

Rates are differences of counters, gateway by gateway, so that a restarted or new gateway adds nothing false.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from deploy.actuators.api import Instance
from deploy.autoscale.signals import PoolCount, Signals
from deploy.controller.figures import GatewayFigures, WorkerFacts, own, workers_of
from gateway.scaling_figures import OWN

WINDOW_S = 30.0
_RISING = ("prompt_tokens_total", "cached_tokens_total", "output_tokens_total", "ended_samples_total")
_OPEN = ("in_flight_samples", "queued_samples")


class Meter(msgspec.Struct, frozen=True, kw_only=True):
    """Counters seen at earlier moments: (monotonic seconds, gateway incarnation -> counter -> value), oldest first."""

    seen: tuple[tuple[float, dict[str, dict[str, float]]], ...] = ()
    prefill_rate: float = 0.0
    """Last rate that busy prefill workers told: it does not vanish when they become idle."""

    def add(self, now: float, gateways: Sequence[GatewayFigures]) -> "Meter":
        """Remember one reading and forget what is older than the window."""
        reading = {g.incarnation: {name: g.values.get(OWN + name, 0.0) for name in _RISING + _OPEN} for g in gateways}
        kept = tuple(entry for entry in self.seen if entry[0] >= now - WINDOW_S)
        rates = [w.get("prefill_tokens_per_s") for w in workers_of(gateways).values() if w.is_prefill]
        busy = [rate for rate in rates if rate > 0]
        rate = sum(busy) / len(busy) if busy else self.prefill_rate
        return Meter(seen=(*kept, (now, reading)), prefill_rate=rate)

    def arrivals(self) -> float:
        """Return requests per second that came in over the window: those that ended, and how many more are open."""
        return max(0.0, self.rate("ended_samples_total") + sum(self.rate(name, least=-inf) for name in _OPEN))

    def rate(self, name: str, *, least: float = 0.0) -> float:
        """Return the mean rise per second of a figure over the window; 0 before two readings."""
        if len(self.seen) < 2:
            return 0.0
        (begin, first), (end, last) = self.seen[0], self.seen[-1]
        rise = sum(
            max(least, counters[name] - first[incarnation][name])
            for incarnation, counters in last.items()
            if incarnation in first
        )
        return rise / (end - begin) if end > begin else 0.0


def signals_of(
    meter: Meter, gateways: Sequence[GatewayFigures], instances: Sequence[Instance], *, now: float, age_s: float
) -> Signals:
    """Combine counters, workers' reports and what the place says exists. `meter` holds the newest reading already."""
    workers = workers_of(gateways)
    prefill = [w for w in workers.values() if w.is_prefill]
    decode = [w for w in workers.values() if not w.is_prefill]
    reading = [w for w in decode if w.get("kv_backlog_bytes") > 0 and w.get("kv_bytes_per_s") > 0]
    samples_per_s = meter.rate("ended_samples_total")
    prompt, cached, output = (
        meter.rate(n) for n in ("prompt_tokens_total", "cached_tokens_total", "output_tokens_total")
    )
    uncached = max(0.0, prompt - cached)
    mean_uncached = uncached / samples_per_s if samples_per_s > 0 else 0.0
    # A full pool puts out what it can, however much arrives: what is asked for is told by the arrivals.
    asked = max(output, meter.arrivals() * output / samples_per_s) if samples_per_s > 0 else output
    in_flight = own(gateways, "in_flight_samples")
    return Signals(
        now=now,
        age_s=age_s,
        prefill=_count(instances, "prefill", workers),
        decode=_count(instances, "decode", workers),
        inflow_uncached_tokens_per_s=uncached,
        queued_uncached_tokens=_sum(prefill, "waiting_tokens") + own(gateways, "queued_samples") * mean_uncached,
        prefill_tokens_per_s=meter.prefill_rate,
        live_kv_tokens=_sum(decode, "kv_live_tokens"),
        waiting_kv_tokens=_sum(decode, "waiting_tokens"),
        kv_capacity_tokens=_sum(decode, "kv_tokens") / len(decode) if decode else 0.0,
        decode_requests=sum(_decoding(w) for w in decode),
        decode_rows=_sum(decode, "rows") / len(decode) if decode else 0.0,
        kv_inflow_tokens_per_s=prompt + output,
        request_life_s=in_flight / samples_per_s if samples_per_s > 0 else 0.0,
        output_tokens_per_s=asked,
        kv_backlog_bytes=_sum(reading, "kv_backlog_bytes"),
        kv_bytes_per_s=_sum(reading, "kv_bytes_per_s"),
        tpot_p95_s=max((w.get("step_s") for w in decode if w.get("running_requests") > 0), default=0.0),
    )


def _sum(workers: Sequence[WorkerFacts], fact: str) -> float:
    return sum(worker.get(fact) for worker in workers)


def _decoding(worker: WorkerFacts) -> float:
    """Requests that one worker's decoding is for. Those that wait behind rows still being prefilled are not counted."""
    running, used = worker.get("running_requests"), worker.get("rows_used")
    return running + worker.get("waiting_requests") * (running / used if used > 0 else 0.0)


def _count(instances: Sequence[Instance], role: str, workers: dict[str, WorkerFacts]) -> PoolCount:
    """A worker is ready when the gateways say so; the place alone cannot know."""
    of_role = [i for i in instances if i.role == role]
    draining = sum(1 for i in of_role if i.state == "draining")
    lost = sum(1 for i in of_role if i.state in {"held", "gone"})
    ready = sum(1 for i in of_role if i.state not in {"draining", "held", "gone"} and _is_ready(workers.get(i.id)))
    return PoolCount(ready=ready, starting=len(of_role) - draining - lost - ready, draining=draining)


def _is_ready(worker: WorkerFacts | None) -> bool:
    return worker is not None and worker.get("is_ready") > 0
