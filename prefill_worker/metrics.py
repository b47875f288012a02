"""Which numbers of a prefill worker are exported under which names."""

from core.engine_metrics import ENGINE_METRICS
from core.exported import Exported
from kv_transfer.factory import NATIVE
from kv_transfer.statistics import ENGINE_RESTARTS

PREFILL_METRICS = (
    *ENGINE_METRICS,
    Exported("worker_prompts_total", "tandem_prefill_prompts_total", "Prompts started for hand-overs."),
    Exported("worker_prompts_failed_total", "tandem_prefill_prompts_failed_total", "Prompts that ended badly here."),
    Exported("transfer_leases", "tandem_transfer_leases", "Leases that live."),
    Exported("transfer_bytes_handed_over", "tandem_transfer_handed_over_bytes_total", "KV bytes of valid releases."),
    Exported("transfer_releases_valid", "tandem_transfer_releases_total", "Hand-overs that were validated."),
    Exported("transfer_releases_invalid", "tandem_transfer_invalid_releases_total", "Releases that came too late."),
    Exported("transfer_prepares", "tandem_transfer_lease_grants_total", "Leases granted."),
    Exported("transfer_renewals", "tandem_transfer_lease_renewals_total", "Leases prolonged by a heartbeat."),
    Exported("transfer_ended_by_expire", "tandem_transfer_lease_expiries_total", "Leases that lapsed."),
    Exported("transfer_orphans", "tandem_transfer_orphans_total", "Leases that lapsed before their first heartbeat."),
    Exported("transfer_ended_by_abort", "tandem_transfer_aborts_total", "Hand-overs that their destination gave up."),
    Exported("transfer_ended_by_unlinked", "tandem_transfer_unlinked_total", "Hand-overs whose destination left."),
    Exported("transfer_leased_pages", "tandem_transfer_leased_pages", "Pages under a lease."),
    Exported("transfer_unknown_messages", "tandem_transfer_unknown_messages_total", "Messages of unknown hand-overs."),
    Exported("transfer_rejects", "tandem_transfer_rejects_total", "Hand-overs that were refused."),
    *(
        Exported(
            f"transfer_engine_restarts_{transport}",
            "tandem_transfer_engine_restarts_total",
            ENGINE_RESTARTS,
            ("transport", transport),
        )
        for transport in NATIVE
    ),
)
