"""The one description of a cluster, `cluster.yaml`, whatever place it runs in: this machine, Ray, Kubernetes.

Declares and checks; renders nothing and starts nothing. See `deploy/cluster.example.yaml`.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from core.errors import ConfigError

Count = Annotated[int, Meta(ge=0, le=4096)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Port = Annotated[int, Meta(ge=0, le=65535)]
ROLES = ("prefill", "decode")
PRE_STOP_S = 6.0
"""Two membership TTLs: no gateway names a worker any more when its SIGTERM arrives."""
GRACE_SLACK_S = 5.0
"""A grace period is at least preStop + drain budget + this."""


class ModelPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model`: what is served."""

    path: Annotated[str, Meta(min_length=1)] = "smollm2"
    """A built-in, or a directory that every process can read (on Kubernetes: inside the weights volume)."""
    served_name: str = ""
    """Name that clients use; empty: `path`."""
    revision: str = "1"
    """Names the weights; a change of it is a rollout."""


class GatewayPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateway`: replicas hold soft state only."""

    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    sets: tuple[str, ...] = ()
    """Settings over the rendered ones, e.g. ``http.max_body_bytes=1000000``."""


class PoolPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prefill` and `decode`: one pool of workers."""

    replicas: Count = 1
    minimum: Count = 1
    maximum: Count = 8
    gpus: Count = 0
    """GPUs of one worker; 0 runs on CPU."""
    devices: tuple[str, ...] = ()
    """On this machine only: `model.device` of its workers by turn, e.g. ``[cuda:0, cuda:1]``. None: ``cuda`` with
    `gpus`, else the CPU. Elsewhere each worker is given GPUs of its own, and the first is taken."""
    nodes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Nodes of one worker group; more than one needs a gang (placement group, DisaggregatedSet)."""
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    memory_gib: Annotated[float, Meta(gt=0)] = 4.0
    tokens_per_s: Annotated[float, Meta(gt=0)] = 1000.0
    """First guess of a busy worker's rate (prefill: uncached tokens, decode: output tokens); measured afterwards."""
    sets: tuple[str, ...] = ()


class SloPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slo`: what the autoscaler defends."""

    ttft_s: Seconds = 2.0
    tpot_s: Seconds = 0.1


class BudgetPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`budget`: what may be spent."""

    workers: Count = 16
    """Most workers of both pools together."""
    autoscale: bool = False
    """False: the controller only advises."""


class PortsPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ports`: fixed ones; every other port is bound to 0 and published."""

    http: Port = 8000
    membership: Port = 9500
    metrics: Port = 9400
    worker: Port = 9600
    """gRPC of a worker where a network policy must name it; 0 elsewhere."""
    transfer: Port = 9700
    """KV data of a worker (tcp) where a network policy must name it; 0 elsewhere."""


class DrainPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`drain`: seconds each role may finish its work after SIGTERM."""

    gateway_s: Seconds = 600.0
    prefill_s: Seconds = 60.0
    decode_s: Seconds = 600.0


class ClusterDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cluster. Every field has a default that runs on a laptop."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$")] = "tandem"
    model: ModelPart = ModelPart()
    gateway: GatewayPart = GatewayPart()
    prefill: PoolPart = PoolPart()
    decode: PoolPart = PoolPart()
    prefill_mode: str = "remote"
    """local | remote | auto: where decode workers let prompts be computed."""
    transfer: str = "auto"
    """auto | shm | tcp | nixl | mooncake | mori"""
    slices: Annotated[int, Meta(ge=1, le=64)] = 1
    """Network domains (NVLink slices, racks) that each hold both roles."""
    slo: SloPart = SloPart()
    budget: BudgetPart = BudgetPart()
    ports: PortsPart = PortsPart()
    drain: DrainPart = DrainPart()

    def pool(self, role: str) -> PoolPart:
        """Return a pool by its role; raises ConfigError for another name."""
        if role not in ROLES:
            raise ConfigError(f"there is no pool {role!r}; the pools are prefill and decode")
        return self.prefill if role == "prefill" else self.decode

    def drain_s(self, role: str) -> float:
        """Return the drain budget of a role (`gateway`, `prefill`, `decode`)."""
        return {"gateway": self.drain.gateway_s, "prefill": self.drain.prefill_s, "decode": self.drain.decode_s}[role]

    def grace_s(self, role: str) -> float:
        """Return the least termination grace period that lets a role drain."""
        return PRE_STOP_S + self.drain_s(role) + GRACE_SLACK_S


def read_description(path: Path) -> ClusterDescription:
    """Read and check a `cluster.yaml`; raises ConfigError that names the file, the field and what is expected."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    try:
        found = msgspec.convert({} if tree is None else tree, ClusterDescription)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        raise ConfigError(f"{path}: {where.rstrip('`').lstrip('.') or 'the top level'}: {text}") from error
    check_description(found)
    return found


def check_description(description: ClusterDescription) -> None:
    """Raise ConfigError with one plain sentence if fields contradict each other."""
    for role in ROLES:
        pool = description.pool(role)
        if not pool.minimum <= pool.replicas <= pool.maximum:
            raise ConfigError(
                f"{role}.replicas is {pool.replicas}, outside {role}.minimum..maximum = {pool.minimum}..{pool.maximum}"
            )
    total = description.prefill.replicas + description.decode.replicas
    if total > description.budget.workers:
        raise ConfigError(f"the pools want {total} workers, but budget.workers is {description.budget.workers}")
    if description.decode.minimum < 1:
        raise ConfigError("decode.minimum must be at least 1: a cluster without a decode worker answers nothing")
    if description.prefill_mode not in {"local", "remote", "auto"}:
        raise ConfigError(f"prefill_mode {description.prefill_mode!r} is not local, remote or auto")
    if description.prefill_mode == "remote" and description.prefill.minimum < 1:
        raise ConfigError("prefill_mode is remote, so prefill.minimum must be at least 1; or use prefill_mode: auto")
