"""Statistics become metrics."""

from core.exported import Exported, ExportedStatistics
from core.metrics import Metrics

TABLE = (
    Exported("pages_free", "tandem_pages_free", "Free pages."),
    Exported("requests_total", "tandem_worker_requests_total", "Requests taken."),
)


def shown(metrics):
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines) if "_created" not in name}


def test_values_are_shown_under_their_metric_names():
    metrics = Metrics()
    exported = ExportedStatistics(metrics, TABLE)
    exported.update({"pages_free": 7, "requests_total": 3, "unknown": 1})
    assert shown(metrics) == {"tandem_pages_free": 7, "tandem_worker_requests_total": 3}


def test_counters_never_go_back_and_missing_values_keep_what_was_shown():
    metrics = Metrics()
    exported = ExportedStatistics(metrics, TABLE)
    for values in ({"pages_free": 7, "requests_total": 3}, {"requests_total": 2}, {"requests_total": 5}):
        exported.update(values)
    assert shown(metrics) == {"tandem_pages_free": 7, "tandem_worker_requests_total": 5}
