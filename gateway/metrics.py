"""The gateway's own metrics: attempts, routing, membership, links. HTTP's are declared beside it. Knows no logic."""

from prometheus_client import Counter

from core.errors import BY_CODE
from core.metrics import Metrics
from gateway.leases import KINDS
from gateway.placer import REASONS
from gateway.series import Series

OUTCOMES = ("stop", "length", "error", "closed")
RETRY_CAUSES = ("worker_lost", "refused", "no_worker", "incomplete")
TIME_CAUSES = ("queue", "route", "no_worker", "retry_pause", "first_token", "decode")
"""Waiting for admission; hashing and placing; waiting for workers; pauses between attempts; admission to the first token
(the three before it included); first token to the end."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIOS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 2.0, 4.0, 10.0)
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class _Gauges:
    """What is so at this moment."""

    def __init__(self, metrics: Metrics) -> None:
        self.leases = metrics.gauge(
            "tandem_gateway_leases_count", "What is held and must be given back.", {"kind": KINDS}
        )
        self.in_flight = metrics.gauge("tandem_gateway_samples_in_flight", "Admitted and not ended.")
        self.queued = metrics.gauge("tandem_gateway_samples_queued", "Waiting for admission.")
        self.workers = metrics.gauge(
            "tandem_gateway_workers_ready", "Workers that may get work.", {"role": ("prefill", "decode")}
        )
        self.members = metrics.gauge(
            "tandem_gateway_workers_registered", "Workers registered.", {"role": ("prefill", "decode")}
        )
        self.index_pages = metrics.gauge("tandem_gateway_index_pages", "Distinct pages in the prefix index.")
        self.index_resyncs = metrics.gauge(
            "tandem_gateway_index_resyncs_count", "Snapshots applied to the prefix index since the start."
        )
        self.index_gaps = metrics.gauge(
            "tandem_gateway_index_gaps_count", "Holes in workers' KV events since the start; each asks for a snapshot."
        )
        self.index_bytes = metrics.gauge("tandem_gateway_index_size_bytes", "Tables of the prefix index.")
        self.sessions = metrics.gauge(
            "tandem_gateway_sessions_count", "Sessions that name themselves.", {"state": ("live", "waiting")}
        )
        self.links = metrics.gauge("tandem_gateway_links_open", "Streams to decode workers.")
        self.step_frames = metrics.gauge(
            "tandem_gateway_step_frames_count", "Step frames received on the links that are open."
        )


class GatewayMetrics(_Gauges):
    """Declared once per process; updated on the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self.samples = Series(
            metrics.counter("tandem_gateway_samples_total", "Samples by how they ended.", {"outcome": OUTCOMES})
        )
        self.errors = metrics.counter(
            "tandem_gateway_errors_total", "Samples that ended with an error, by its code.", {"code": tuple(BY_CODE)}
        )
        self.time = Series(
            metrics.counter(
                "tandem_gateway_time_seconds_total", "Where the time of samples went.", {"cause": TIME_CAUSES}
            )
        )
        often = ("queue", "first_token", "decode", "route")
        self.time_queue, self.time_first_token, self.time_decode, self.time_route = map(self.time.labels, often)
        self.reloads = metrics.counter(
            "tandem_gateway_key_reloads_total", "Changes of the key file.", {"result": ("ok", "failed")}
        )
        self.attempts = metrics.counter("tandem_gateway_attempts_total", "Requests submitted to decode workers.")
        self.retries = metrics.counter(
            "tandem_gateway_retries_total", "Further attempts by cause.", {"cause": RETRY_CAUSES}
        )
        self.resumes = metrics.counter(
            "tandem_gateway_resumes_total", "Further attempts of samples whose client already had tokens."
        )
        self.placements = metrics.counter(
            "tandem_gateway_prefill_placements_total", "Prefill workers named after another was lost or refused."
        )
        self.fallbacks = metrics.counter(
            "tandem_gateway_prefill_fallbacks_total",
            "Attempts whose decode worker computes the prompt although it should not: no prefill worker could be had.",
        )
        self.surplus_tokens = metrics.counter(
            "tandem_gateway_repeated_tokens_total", "Output tokens that came again and were dropped."
        )
        self.output_tokens = metrics.counter("tandem_gateway_output_tokens_total", "Output tokens handed on.")
        self.cached_tokens = metrics.counter(
            "tandem_gateway_cached_tokens_total", "Prompt tokens that workers found in their caches."
        )
        self.prompt_tokens = metrics.counter("tandem_gateway_prompt_tokens_total", "Prompt tokens of started samples.")
        self.bytes_pulled = metrics.counter(
            "tandem_gateway_pulled_bytes_total", "KV bytes that decode workers pulled for our samples."
        )
        self.recomputed_tokens = metrics.counter(
            "tandem_gateway_recomputed_tokens_total", "Prompt tokens computed again by decode workers."
        )
        self.first_token_seconds = metrics.histogram(
            "tandem_gateway_first_token_seconds", "From admission to the first token.", SECONDS
        )
        self.queue_seconds = metrics.histogram("tandem_gateway_queue_seconds", "Wait for admission.", SECONDS)
        self.route_seconds = metrics.histogram("tandem_gateway_route_seconds", "Hashing and placing.", SECONDS)
        self.prefix_share = metrics.histogram(
            "tandem_gateway_prefix_match_ratio", "Share of the prompt that the chosen prefill side held.", SHARES
        )
        self.route_choices = Series(
            metrics.counter("tandem_gateway_route_choices_total", "Placements by what decided.", {"reason": REASONS})
        )
        self.predicted_ratio = metrics.histogram(
            "tandem_gateway_predicted_wait_ratio", "Predicted over measured seconds to the prompt's end.", RATIOS
        )

    def time_split(self) -> dict[str, float]:
        """Return the seconds of all samples so far by cause."""
        return {cause: total_of(self.time.labels(cause)) for cause in TIME_CAUSES}

    def token_totals(self) -> dict[str, float]:
        """Return tokens so far by kind."""
        return {
            "prompt": total_of(self.prompt_tokens),
            "cached": total_of(self.cached_tokens),
            "output": total_of(self.output_tokens),
            "recomputed": total_of(self.recomputed_tokens),
        }


def total_of(counter: Counter) -> float:
    """Return a counter's value."""
    return sum(
        sample.value for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")
    )
