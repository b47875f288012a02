"""Which numbers of a decode worker are exported under which names."""

from core.engine_metrics import ENGINE_METRICS
from core.exported import Exported

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
    Exported("transfer_bytes_pulled", "tandem_transfer_pulled_bytes_total", "KV bytes pulled."),
    Exported("transfer_open_ops", "tandem_transfer_open_ops", "Reads that may still write into our pages."),
)
