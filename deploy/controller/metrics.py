"""The controller's own metrics. Knows no logic."""

from core.metrics import Metrics
from deploy.autoscale.decide import Decision

ROLES = ("prefill", "decode")
TERMS = ("total", "kv", "rate")
REASONS = ("grow", "shrink", "steady", "stale", "network_bound", "settling", "window", "budget", "minimum")


class ScalerMetrics:
    """Declared once; set after every decision."""

    def __init__(self, metrics: Metrics) -> None:
        self._desired = metrics.gauge("tandem_scaler_desired_workers", "Workers a pool should have.", {"role": ROLES})
        self._need = metrics.gauge(
            "tandem_scaler_need_workers", "Workers a pool needs, by term.", {"role": ROLES, "term": TERMS}
        )
        self._outcomes = metrics.counter(
            "tandem_scaler_decisions_total", "Decisions by pool and reason.", {"role": ROLES, "reason": REASONS}
        )
        self._over_budget = metrics.gauge(
            "tandem_scaler_over_budget_state", "1 while the load needs more than allowed."
        )
        self._errors = metrics.counter("tandem_scaler_errors_total", "Orders that the place refused or failed.")

    def show(self, decision: Decision) -> None:
        """Publish one decision."""
        for role, pool in (("prefill", decision.prefill), ("decode", decision.decode)):
            self._desired.labels(role).set(pool.target)
            self._need.labels(role, "total").set(pool.need)
            self._outcomes.labels(role, pool.reason).inc()
        self._need.labels("prefill", "rate").set(decision.needs.prefill)
        self._need.labels("decode", "kv").set(decision.needs.decode_kv)
        self._need.labels("decode", "rate").set(decision.needs.decode_rate)
        self._over_budget.set(decision.over_budget)

    def failed(self) -> None:
        """Count an order that could not be carried out."""
        self._errors.inc()
