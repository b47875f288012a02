"""Configuration sections that every worker process has, whatever its role. Declares settings; reads no file."""

from typing import Annotated

import msgspec
from msgspec import Meta

from core.tls import TlsSection
from core.tracing.api import TracingSection


class WorkerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[worker]`: who this process is and where it listens."""

    id: Annotated[str, Meta(min_length=1)]
    """Stable name of the process slot, e.g. ``decode-1``."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    advertise_host: str = ""
    """Address that peers and gateways connect to; empty: `host`. KV data has its own: `transfer.advertise_host`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """gRPC port; 0 lets the system choose, the bound one is published."""
    http_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of /livez, /readyz, /startz, /metrics, /statusz."""
    gateways: tuple[str, ...] = ()
    """Membership addresses: host:port, or dns:name:port for every address behind a name, looked up again and again.
    Sibling gateway processes are found from these."""
    secret_file: str = ""
    """File with the cluster secret, equal for all processes. Empty: an open cluster."""
    tls: TlsSection = TlsSection()
    tracing: TracingSection = TracingSection()
    domain: str = ""
    """Network domain (slice, rack): routing prefers pairs inside one."""
    run_dir: str = ""
    """Where `<id>.json` with the bound addresses is written when ready. Empty: nowhere."""
    log_level: str = "INFO"
    stall_s: Annotated[float, Meta(gt=0)] = 30.0
    """/livez fails when the engine's thread has not passed its loop for so long."""


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[model]`: what is served."""

    path: Annotated[str, Meta(min_length=1)]
    """Model directory."""
    name: str = ""
    """Name that clients use; empty: the model's own."""
    dtype: str = ""
    """f32 | f64 | bf16; empty: the checkpoint's."""
    device: str = "cpu"
    """Where weights and KV lie: cpu | cuda | cuda:N | auto (the first GPU if there is one, else the CPU)."""
    mode: str = ""
    """For models that can replay windows: exact | replay | mask (means the same as replay, computes everything). Empty:
    the model's own default."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Compute threads; 0: `engine.threads`."""
    verify: bool = True
    """Compare file checksums with the directory's manifest before loading."""


class DrainSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[drain]`: how a process leaves."""

    budget_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """Seconds for running work after SIGTERM; what is left then is handed back to the gateways."""
