"""Configuration of `tandem controller`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from core.tls import TlsSection
from deploy.autoscale.signals import Rules


class ControllerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[controller]`: which cluster, and how it is asked."""

    id: str = "controller-1"
    place: str = "local"
    """local | ray | k8s"""
    target: str = ""
    """What the place needs to find the cluster: local, the launcher's run directory; ray, its address; k8s, the
    namespace."""
    gateways: tuple[str, ...] = ()
    """Membership addresses of all gateway processes: host:port, or dns:name:port for every address behind a name."""
    secret_file: str = ""
    tls: TlsSection = TlsSection()
    run_dir: str = ""
    """Where the lock, the journal `<id>.decisions.jsonl` and the ready file lie."""
    advisory: bool = False
    """Decide, write and publish, but change nothing."""
    interval_s: Annotated[float, Meta(gt=0, le=300)] = 5.0
    http_host: str = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    log_level: str = "INFO"


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    controller: ControllerSection = ControllerSection()
    autoscale: Rules = Rules()
