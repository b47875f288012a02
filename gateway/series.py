"""The labelled series of one metric, each looked up once: the registry's own look-up costs more than the count."""

from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

Metric = TypeVar("Metric", Counter, Histogram)


class Series(Generic[Metric]):
    """Stands for a metric whose series are never removed, and of which there is a bounded number."""

    __slots__ = ("_known", "metric")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._known: dict[tuple[str, ...], Metric] = {}

    def labels(self, *values: str) -> Metric:
        """Return the series with these label values."""
        found = self._known.get(values)
        if found is None:
            found = self._known[values] = self.metric.labels(*values)
        return found
