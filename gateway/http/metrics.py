"""Counters of the HTTP interface. Knows neither routes' bodies nor the cluster."""

from prometheus_client import CollectorRegistry

from gateway.series import LoopMetrics, Series
from gateway.text.verdict import VERDICTS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ROUTES = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
"""The generation routes, as labels."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class HttpMetrics:
    """All metrics of this package, in an injected registry, which /metrics shows whole."""

    def __init__(self, registry: CollectorRegistry) -> None:
        metrics = self.metrics = LoopMetrics(registry)
        self.requests = Series(
            metrics.counter(
                "tandem_http_requests_total",
                "Answered requests by route and status; 499: the client left first.",
                {"route": (), "status": ()},
            )
        )
        self.open_requests = metrics.gauge("tandem_http_open_requests", "Generation requests being answered.")
        self.duration = Series(
            metrics.histogram(
                "tandem_http_request_duration_seconds",
                "From the arrival of a request's headers to the last byte of its answer, generation routes only.",
                _SECONDS,
                {"route": ROUTES},
            )
        )
        self.first_token = Series(
            metrics.histogram(
                "tandem_http_time_to_first_token_seconds",
                "From the arrival of a request's headers to the cluster's first delta.",
                _SECONDS,
                {"route": ROUTES},
            )
        )
        self.prompt_tokens = metrics.counter(
            "tandem_http_prompt_tokens_total", "Prompt tokens of requests that got a first token."
        )
        self.cached_tokens = metrics.counter(
            "tandem_http_cached_tokens_total", "Prompt tokens found in a worker's cache."
        )
        self.completion_tokens = metrics.counter(
            "tandem_http_completion_tokens_total", "Output tokens counted in usage."
        )
        self.surplus_tokens = metrics.counter(
            "tandem_http_surplus_tokens_total",
            "Output tokens received after a stop string had completed, dropped.",
        )
        self.ignored_fields = metrics.counter(
            "tandem_http_ignored_fields_total", "Unknown body fields, accepted without effect."
        )
        self.structured = Series(
            metrics.counter(
                "tandem_http_structured_answers_total",
                "Finished answers that were to have a form, by whether they have it.",
                {"verdict": VERDICTS},
            )
        )
        self.disconnects = metrics.counter(
            "tandem_http_disconnects_total",
            "Clients that went before the end of their answer, or took nothing for too long.",
            {"cause": ("left", "slow")},
        )

    def render(self) -> bytes:
        """Return the registry in Prometheus' text format."""
        return self.metrics.render()
