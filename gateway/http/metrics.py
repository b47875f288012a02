"""Counters of the HTTP interface. Knows neither routes' bodies nor the cluster."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class HttpMetrics:
    """All metrics of this package, in an injected registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = Counter(
            "tandem_http_requests_total",
            "Answered requests by route and status; 499: the client left first.",
            ("route", "status"),
            registry=registry,
        )
        self.open_requests = Gauge(
            "tandem_http_open_requests", "Generation requests being answered.", registry=registry
        )
        self.duration = Histogram(
            "tandem_http_request_duration_seconds",
            "From the first byte of the request to the last of the answer, generation routes only.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "tandem_http_time_to_first_token_seconds",
            "From the first byte of the request to the first delta of the cluster.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter("tandem_http_prompt_tokens_total", "Prompt tokens answered.", registry=registry)
        self.cached_tokens = Counter(
            "tandem_http_cached_tokens_total", "Prompt tokens found in a worker's cache.", registry=registry
        )
        self.completion_tokens = Counter(
            "tandem_http_completion_tokens_total", "Output tokens counted in usage.", registry=registry
        )
        self.surplus_tokens = Counter(
            "tandem_http_surplus_tokens_total",
            "Output tokens received after a stop string had completed, dropped.",
            registry=registry,
        )
        self.ignored_fields = Counter(
            "tandem_http_ignored_fields_total", "Unknown body fields, accepted without effect.", registry=registry
        )
        self.disconnects = Counter(
            "tandem_http_disconnects_total",
            "Clients that went before the end of their answer, or took nothing for too long.",
            ("cause",),
            registry=registry,
        )

    def render(self) -> bytes:
        """Return the registry in Prometheus' text format."""
        return generate_latest(self._registry)
