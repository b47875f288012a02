"""Configuration of a gateway process, section by section; sections are declared beside their owners."""

from typing import Annotated

import msgspec
from msgspec import Meta

from core.tls import TlsSection
from core.tracing.api import TracingSection
from core.worker_config import DrainSection
from gateway.admission import Limits
from gateway.attempt import RetryRules
from gateway.breaker import BreakerRules
from gateway.http.config import ApiConfig
from gateway.http.protocol import GuardRules
from gateway.http.server import HttpTls
from gateway.routing.job import RoutingRules
from gateway.trace_recorder import RecorderRules
from gateway.worker_link import LinkRules

Port = Annotated[int, Meta(ge=0, le=65535)]
"""0 lets the system choose; the bound one is published."""


class HttpSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[http]`: where clients connect."""

    host: str = "127.0.0.1"
    port: Port = 8000
    reuse_port: bool = False
    """Share the port with other processes of this host; `processes` sets it."""
    listener_fd: int = -1
    """Descriptor of a listening socket that the parent process opened, instead of `host` and `port`; whoever holds it
    shares its queue, so one process can follow another and no connection is lost. -1: none."""
    hold_for: tuple[str, ...] = ()
    """Roles of which a worker must be ready before the first connection is taken; until then they wait in the queue. So a
    gateway that follows another refuses nothing that the other could serve."""
    hold_s: Annotated[float, Meta(ge=0)] = 30.0
    """How long they wait at most."""
    guard: GuardRules = GuardRules()
    tls: HttpTls = HttpTls()


class AccessSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[access]`: who may ask, and what is written down about it."""

    keys_file: str = ""
    """TOML file of tenants and hashed keys, followed while running (see `gateway.tenants`). Empty: everybody may ask."""
    log: bool = True
    """Write one JSON line for each HTTP request. Never bodies, keys or headers."""


class MembershipSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[membership]`: where workers register and operators ask."""

    host: str = "127.0.0.1"
    advertise_host: str = ""
    """Address that workers are told to connect to; empty: `host`."""
    port: Port = 9500
    siblings: tuple[str, ...] = ()
    """Membership addresses of the other gateway processes, told to every worker."""
    ttl_s: Annotated[float, Meta(gt=0)] = 3.0
    """A worker that is silent for so long is gone; it sends a heartbeat every second."""
    mixed_fingerprints: bool = False
    """Accept workers of different fingerprints for one model (rolling updates); they are never paired."""
    max_workers: Annotated[int, Meta(ge=1)] = 4096


class ListenerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[listener]`: probes and metrics on a thread of their own, for orchestrators."""

    host: str = "127.0.0.1"
    port: Port = 0
    stall_s: Annotated[float, Meta(gt=0)] = 10.0
    """/livez fails when the event loop has not turned for so long."""


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[model]`: whose text this gateway speaks."""

    path: Annotated[str, Meta(min_length=1)]
    """Directory with tokenizer.json and, for chat, the chat template."""
    name: str = ""
    """Accept workers of this model only. Empty: whatever they serve."""


class GatewayDrain(DrainSection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[drain]`: how a gateway leaves."""

    accept_s: Annotated[float, Meta(ge=0)] = 0.0
    """How long new requests are still taken after /readyz has turned: as long as load balancers need to notice."""
    hand_over: bool = False
    """Stop listening at once, because another process shares the socket (`http.listener_fd`) and takes what comes."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file of `python -m gateway --config FILE`."""

    id: Annotated[str, Meta(min_length=1)] = "gateway-1"
    run_dir: str = ""
    """Where `<id>.json` with the bound addresses is written when ready. Empty: nowhere."""
    secret_file: str = ""
    """File with the cluster secret, equal for all processes. Empty: an open cluster."""
    log_level: str = "INFO"
    processes: Annotated[int, Meta(ge=1, le=256)] = 1
    """Processes that share the HTTP port of this host; membership ports are consecutive from the configured one."""
    tls: TlsSection = TlsSection()
    model: ModelSection
    http: HttpSection = HttpSection()
    membership: MembershipSection = MembershipSection()
    listener: ListenerSection = ListenerSection()
    access: AccessSection = AccessSection()
    tracing: TracingSection = TracingSection()
    api: ApiConfig = ApiConfig()
    routing: RoutingRules = RoutingRules()
    recorder: RecorderRules = RecorderRules()
    limits: Limits = Limits()
    retries: RetryRules = RetryRules()
    links: LinkRules = LinkRules()
    breaker: BreakerRules = BreakerRules()
    drain: GatewayDrain = GatewayDrain(budget_s=600.0)
