"""Prometheus metrics with an injected registry: naming rules are checked when a metric is declared.

A service declares its metrics in one class over one `Metrics`; names are ``tandem_<noun>_<unit>`` in base units,
counters end in ``_total``, label values come from closed sets. Knows no service.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of `Metrics.render`."""

_NAME = re.compile(r"tandem_[a-z][a-z0-9]*(_[a-z0-9]+)+")
_NOT_BASE_UNITS = (
    "ms",
    "us",
    "ns",
    "milliseconds",
    "minutes",
    "hours",
    "kb",
    "mb",
    "gb",
    "kib",
    "mib",
    "gib",
    "percent",
)
MAX_LABEL_SETS = 1000

Labels = Mapping[str, Sequence[str]]
"""Label name -> all values it may take; an empty sequence: names of workers and the like, bounded by the fleet."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One line of the catalogue."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]


class Metrics:
    """The metrics of one process or service. Declaring is for start-up; the metrics themselves are thread-safe."""

    counter_type: type[Counter] = Counter
    histogram_type: type[Histogram] = Histogram
    """For subclasses whose metrics have one writer and may count without a lock."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry(auto_describe=True)
        self._catalogue: dict[str, MetricInfo] = {}

    def counter(self, name: str, text: str, labels: Labels | None = None) -> Counter:
        """Declare something that only grows; the name ends in ``_total``."""
        self._declare(name, "counter", text, labels)
        metric = self.counter_type(name, text, tuple(labels or ()), registry=self.registry)
        for values in _closed_sets(labels):
            metric.labels(*values)
        return metric

    def gauge(
        self, name: str, text: str, labels: Labels | None = None, read: Callable[[], float] | None = None
    ) -> Gauge:
        """Declare something that goes up and down; with `read` it is asked for at every scrape, on its thread."""
        self._declare(name, "gauge", text, labels)
        metric = Gauge(name, text, tuple(labels or ()), registry=self.registry)
        for values in _closed_sets(labels):
            metric.labels(*values)
        if read is not None:
            metric.set_function(read)
        return metric

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Labels | None = None) -> Histogram:
        """Declare a distribution with these upper bounds (ascending, without +Inf)."""
        if list(buckets) != sorted(set(buckets)) or not buckets:
            raise ValueError(f"buckets of {name} must ascend")
        self._declare(name, "histogram", text, labels)
        metric = self.histogram_type(name, text, tuple(labels or ()), registry=self.registry, buckets=tuple(buckets))
        for values in _closed_sets(labels):
            metric.labels(*values)
        return metric

    def _declare(self, name: str, kind: str, text: str, labels: Labels | None) -> None:
        check_name(name, kind)
        if name in self._catalogue:
            raise ValueError(f"metric {name} is declared twice")
        if not text.strip():
            raise ValueError(f"metric {name} needs a help text")
        self._catalogue[name] = MetricInfo(name, kind, text, tuple(labels or ()))

    def catalogue(self) -> tuple[MetricInfo, ...]:
        """Return all declared metrics by name: what the doc page is compared with."""
        return tuple(self._catalogue[name] for name in sorted(self._catalogue))

    def render(self) -> bytes:
        """Return the text exposition; any thread."""
        return generate_latest(self.registry)


class CappedLabel:
    """Bounds the values of a label that come from outside: the first `limit` keep their names, all others are `other`."""

    def __init__(self, limit: int = 200) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """Return the label to use for a value."""
        if value in self._known:
            return value
        if len(self._known) < self._limit:
            self._known.add(value)
            return value
        return "other"


def check_name(name: str, kind: str) -> None:
    """Raise ValueError if a metric's name breaks the rules."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"metric name {name!r} is not of the form tandem_<noun>_<unit> in lower case")
    if (kind == "counter") != name.endswith("_total"):
        raise ValueError(f"metric name {name!r}: counters, and only counters, end in _total")
    bare = name.removesuffix("_total")
    for unit in _NOT_BASE_UNITS:
        if bare.endswith(f"_{unit}"):
            raise ValueError(f"metric name {name!r}: use base units (seconds, bytes, ratio), not {unit}")


def _closed_sets(labels: Labels | None) -> list[tuple[str, ...]]:
    # Series of closed label sets exist from the start, so that a rate over "no error yet" is 0 and not absent.
    if not labels or not all(labels.values()):
        return []
    sets = list(product(*labels.values()))
    if len(sets) > MAX_LABEL_SETS:
        raise ValueError(f"labels {tuple(labels)} would make {len(sets)} series")
    return sets
