"""Metrics of the gateway, which the event loop counts some thirty times a request: plain numbers, no locks, no look-ups.

Only the event loop's thread counts; a scrape on another thread reads a number that is at most one count old.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from core.metrics import Metrics

Metric = TypeVar("Metric", Counter, Histogram)


class LoopCounter(Counter):
    """A counter with one writer."""

    def _metric_init(self) -> None:
        self._total = 0.0

    def inc(self, amount: float = 1, exemplar: Mapping[str, str] | None = None) -> None:
        del exemplar
        if amount < 0:
            raise ValueError("counters only grow")
        self._total += amount

    def _child_samples(self) -> Iterable[Sample]:
        return (Sample("_total", {}, self._total, None, None),)


class LoopHistogram(Histogram):
    """A histogram with one writer."""

    def _metric_init(self) -> None:
        self._counts = [0] * len(self._upper_bounds)
        self._sum_of_all = 0.0

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        del exemplar
        self._sum_of_all += amount
        self._counts[bisect_left(self._upper_bounds, amount)] += 1

    def _child_samples(self) -> Iterable[Sample]:
        so_far, samples = 0, list[Sample]()
        for bound, count in zip(self._upper_bounds, self._counts, strict=True):
            so_far += count
            samples.append(Sample("_bucket", {"le": floatToGoString(bound)}, so_far, None, None))
        samples.append(Sample("_count", {}, so_far, None, None))
        samples.append(Sample("_sum", {}, self._sum_of_all, None, None))
        return tuple(samples)


class LoopMetrics(Metrics):
    """The metrics of one event loop."""

    counter_type = LoopCounter
    histogram_type = LoopHistogram


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
