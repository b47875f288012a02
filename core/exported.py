"""Statistics of a service as metrics: a table of names says which value is exported as what.

Parts of a process count in plain numbers and know no metrics; one poller feeds those numbers in here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Gauge

from core.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Exported:
    """One statistic and the metric that shows it; a metric whose name ends in ``_total`` only grows."""

    statistic: str
    metric: str
    help: str
    label: tuple[str, str] | None = None
    """(name, value) of the metric's one label: rows of one metric differ in the value."""


class ExportedStatistics:
    """Declares a table of metrics and copies statistics into them. One thread updates, any thread scrapes."""

    def __init__(self, metrics: Metrics, table: Sequence[Exported]) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._last: dict[str, float] = {}
        declared: dict[str, Counter | Gauge] = {}
        for row in table:
            if row.metric not in declared:
                values = [other.label[1] for other in table if other.metric == row.metric and other.label]
                labels = {row.label[0]: values} if row.label else None
                declare = metrics.counter if row.metric.endswith("_total") else metrics.gauge
                declared[row.metric] = declare(row.metric, row.help, labels)
            whole = declared[row.metric]
            shown = whole.labels(row.label[1]) if row.label else whole
            if isinstance(shown, Counter):
                self._counters[row.statistic] = shown
            else:
                self._gauges[row.statistic] = shown

    def update(self, values: Mapping[str, float]) -> None:
        """Show these values; statistics that are missing keep what they showed."""
        for name, gauge in self._gauges.items():
            if name in values:
                gauge.set(values[name])
        for name, counter in self._counters.items():
            value = values.get(name, 0.0)
            counter.inc(max(0.0, value - self._last.get(name, 0.0)))
            self._last[name] = max(value, self._last.get(name, 0.0))
