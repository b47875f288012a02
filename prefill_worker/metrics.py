"""Which numbers of a prefill worker are exported under which names."""

from core.engine_metrics import ENGINE_METRICS
from core.exported import Exported

PREFILL_METRICS = (
    *ENGINE_METRICS,
    Exported("worker_prompts_total", "tandem_prefill_prompts_total", "Prompts started for hand-overs."),
    Exported("worker_prompts_failed_total", "tandem_prefill_prompts_failed_total", "Prompts that ended badly here."),
    Exported("transfer_leases", "tandem_transfer_leases", "Leases that live."),
    Exported("transfer_bytes_handed_over", "tandem_transfer_handed_over_bytes_total", "KV bytes of valid releases."),
    Exported("transfer_releases_valid", "tandem_transfer_releases_total", "Hand-overs that were validated."),
    Exported("transfer_releases_invalid", "tandem_transfer_invalid_releases_total", "Releases that came too late."),
    Exported("transfer_rejects", "tandem_transfer_rejects_total", "Hand-overs that were refused."),
)
