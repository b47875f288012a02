"""Which numbers of a decode worker are exported under which names."""

from core.engine_metrics import ENGINE_METRICS
from core.exported import Exported
from core.metrics import Metrics
from kv_transfer.factory import BACKENDS, NATIVE
from kv_transfer.statistics import ENGINE_RESTARTS, STAGES, WORSE_WAYS, Observe

_BY_TRANSPORT = (
    ("bytes_landed", "tandem_transfer_landed_bytes_total", "KV bytes that arrived."),
    ("reads", "tandem_transfer_reads_total", "Reads posted."),
    ("records", "tandem_transfer_records_total", "Contiguous copies in those reads."),
    ("reads_failed", "tandem_transfer_reads_failed_total", "Reads that ended with an error."),
    ("reads_refused_full", "tandem_transfer_reads_refused_total", "Times a full transport made a read wait."),
)
_STAGE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def stage_times(metrics: Metrics) -> Observe:
    """Declare the distribution of a hand-over's stages and return what fills it."""
    times = metrics.histogram(
        "tandem_transfer_stage_seconds",
        "Time of each stage of a hand-over.",
        _STAGE_BUCKETS,
        {"stage": STAGES, "transport": tuple(BACKENDS)},
    )
    return lambda stage, transport, seconds: times.labels(stage, transport).observe(seconds)


DECODE_METRICS = (
    *ENGINE_METRICS,
    Exported("worker_requests_total", "tandem_decode_requests_total", "Requests taken from gateways."),
    Exported("worker_requests_live", "tandem_decode_requests_live", "Requests without a terminal record."),
    Exported("worker_hand_overs_total", "tandem_decode_hand_overs_total", "Hand-overs validated."),
    Exported("worker_need_prefill_total", "tandem_decode_need_prefill_total", "Prefill workers lost before FINAL."),
    Exported("worker_recovered_here_total", "tandem_decode_recovered_total", "Prompts computed here after FINAL."),
    Exported("worker_aborted_total", "tandem_decode_aborted_total", "Requests that their gateway gave up."),
    Exported("worker_frames_sent", "tandem_decode_frames_total", "Step frames sent to gateways."),
    Exported("worker_frames_unacked", "tandem_decode_frames_unacked", "Frames kept for replay."),
    Exported("worker_gateway_streams_attached", "tandem_decode_gateways_attached", "Gateway streams connected."),
    *(
        Exported(f"transfer_{statistic}_{transport}", metric, text, ("transport", transport))
        for statistic, metric, text in _BY_TRANSPORT
        for transport in BACKENDS
    ),
    *(
        Exported(
            f"transfer_engine_restarts_{transport}",
            "tandem_transfer_engine_restarts_total",
            ENGINE_RESTARTS,
            ("transport", transport),
        )
        for transport in NATIVE
    ),
    *(
        Exported(
            f"transfer_worse_ways_{transport}", "tandem_transfer_worse_ways_total", WORSE_WAYS, ("transport", transport)
        )
        for transport in NATIVE
    ),
    Exported("transfer_pulls", "tandem_transfer_pulls_total", "Hand-overs begun."),
    Exported("transfer_pulls_failed", "tandem_transfer_pulls_failed_total", "Hand-overs that failed."),
    Exported(
        "transfer_pulls_cancelled", "tandem_transfer_pulls_cancelled_total", "Hand-overs given up by their caller."
    ),
    Exported("transfer_digest_failures", "tandem_transfer_digest_failures_total", "Hand-overs whose bytes differed."),
    Exported("transfer_leases_lost", "tandem_transfer_leases_lost_total", "Hand-overs whose lease did not hold."),
    Exported(
        "transfer_questions_repeated", "tandem_transfer_questions_repeated_total", "PREPARE or RELEASE sent once more."
    ),
    Exported("transfer_unproven_pages", "tandem_transfer_unproven_pages", "Pages in quarantine."),
    Exported("transfer_unproven_oldest_s", "tandem_transfer_unproven_age_seconds", "Age of the oldest of them."),
    Exported("transfer_fences", "tandem_transfer_fences_total", "Transports destroyed as the proof of their reads."),
    Exported("transfer_breakers_open", "tandem_transfer_breakers_open", "Prefill workers that are left alone."),
    Exported("transfer_sessions", "tandem_transfer_sessions", "Prefill workers connected."),
    Exported("transfer_late_messages", "tandem_transfer_late_messages_total", "Messages of ended hand-overs."),
    Exported("transfer_bytes_pulled", "tandem_transfer_pulled_bytes_total", "KV bytes pulled."),
    Exported("transfer_open_ops", "tandem_transfer_open_ops", "Reads that may still write into our pages."),
)
