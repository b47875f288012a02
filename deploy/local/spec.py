"""One description of a local cluster, and the configuration of each process that follows from it.

Pure: no process is started and no file is written here. Section names are those of the services' own config structs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from core.errors import ConfigError
from kv_transfer.factory import check_transports

SERVICE_MODULES = {
    "gateway": "gateway",
    "prefill": "prefill_worker",
    "decode": "decode_worker",
    "controller": "deploy.controller",
}
"""Role of a process -> the package that is run with ``python -m``."""


HAND_OVER_S = 0.5
"""How long a leaving gateway takes requests on the connections that it has; new ones go to its successor."""


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tandem up` starts. Every field has a flag; `sets` reach the services' own configuration."""

    name: str = "default"
    model: str = "smollm2"
    """A built-in (`smollm2`, `tiny-llama`, `tiny-window`, `scripted`) or a model directory."""
    served_name: str = ""
    prefill: Annotated[int, Meta(ge=0, le=64)] = 1
    decode: Annotated[int, Meta(ge=1, le=64)] = 1
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    transfer: str = "auto"
    """auto, or a transport of `kv_transfer.factory`"""
    prefill_mode: str = "remote"
    """local | remote | auto: where the decode workers let prompts be computed."""
    drain_s: Annotated[float, Meta(ge=0)] = 60.0
    log_level: str = "INFO"
    autoscale: bool = False
    """Run a controller that sizes the pools; its rules are `--set controller:autoscale.KEY=VALUE`."""
    devices: dict[str, tuple[str, ...]] = {}
    """Role (`prefill`, `decode`) -> `model.device` of its workers by turn (worker 1 has the first); without: the CPU.
    From a `cluster.yaml`; its flag is ``--set prefill:model.device=cuda:0``."""
    sets: dict[str, tuple[str, ...]] = {}
    """Role (`gateway`, `prefill`, `decode`, `controller`, `all`: both workers) -> overrides such as ``engine.num_pages=64``."""


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """What processes are started from; a rollout replaces those of one revision by those of the next."""

    number: int
    spec: ClusterSpec
    model_dir: Path


def with_sets(spec: ClusterSpec, more: Mapping[str, Sequence[str]]) -> ClusterSpec:
    """Return `spec` with `more` settings (role -> ``key=value``); an older one of the same key is replaced."""
    sets = dict(spec.sets)
    for role, values in more.items():
        keys = {value.partition("=")[0] for value in values}
        kept = (value for value in sets.get(role, ()) if value.partition("=")[0] not in keys)
        sets[role] = (*kept, *values)
    return msgspec.structs.replace(spec, sets=sets)


def changed_roles(old: Revision, new: Revision) -> set[str]:
    """Return the roles whose processes differ between two revisions; all of them if none does: a plain restart."""
    roles = set(SERVICE_MODULES)
    if old.model_dir != new.model_dir:
        return roles
    return {role for role in roles if overrides(old.spec, role) != overrides(new.spec, role)} or roles


def check_spec(spec: ClusterSpec) -> None:
    """Raise ConfigError with one plain sentence if no cluster can be started from this."""
    check_transports((spec.transfer,))
    if spec.prefill_mode not in {"local", "remote", "auto"}:
        raise ConfigError(f"unknown prefill mode {spec.prefill_mode!r}; use local, remote or auto")
    if spec.prefill_mode == "remote" and spec.prefill == 0:
        raise ConfigError(
            "prefill_mode is remote but there are 0 prefill workers; use --prefill 1 or --prefill-mode local"
        )
    unknown = set(spec.sets) - {*SERVICE_MODULES, "all"}
    if unknown:
        raise ConfigError(f"--set knows the roles gateway, prefill, decode, controller and all, not {min(unknown)!r}")


def threads_per_worker(cores: int, workers: int) -> int:
    """Give each worker max(1, cores // workers) compute threads, so that heartbeats never starve."""
    return max(1, cores // max(1, workers))


def device_of(spec: ClusterSpec, role: str, worker_id: str) -> str:
    """Return the `model.device` of a worker, by its number."""
    devices = spec.devices.get(role) or ("cpu",)
    return devices[(int(worker_id.rpartition("-")[2]) - 1) % len(devices)]


def worker_config(
    spec: ClusterSpec, *, role: str, worker_id: str, run_dir: Path, model_dir: Path, gateways: list[str], threads: int
) -> dict[str, object]:
    """Return the configuration of one worker as nested plain data (TOML)."""
    config: dict[str, object] = {
        "worker": {
            "id": worker_id,
            "host": spec.host,
            "gateways": gateways,
            "secret_file": str(run_dir / "secret"),
            "run_dir": str(run_dir),
            "log_level": spec.log_level,
        },
        "model": {
            "path": str(model_dir),
            "name": spec.served_name or spec.model,
            "threads": threads,
            "device": device_of(spec, role, worker_id),
        },
        "transfer": {"transports": [spec.transfer]},
        "drain": {"budget_s": spec.drain_s},
    }
    if role == "decode":
        config["prefill"] = {"mode": spec.prefill_mode}
    return config


def gateway_config(
    spec: ClusterSpec,
    *,
    gateway_id: str,
    run_dir: Path,
    model_dir: Path,
    http_port: int,
    listener_fd: int,
    membership_port: int,
    sibling: str,
) -> dict[str, object]:
    """Return the configuration of a gateway as nested plain data (TOML).

    Ready for a rollout: `sibling` is the membership address of the gateway that will replace this one on the same
    socket, and workers of two revisions may be here (never paired). The launcher checks that one revision is one.
    """
    return {
        "id": gateway_id,
        "run_dir": str(run_dir),
        "secret_file": str(run_dir / "secret"),
        "log_level": spec.log_level,
        "http": {
            "host": spec.host,
            "port": http_port,
            "listener_fd": listener_fd,
            "reuse_port": listener_fd < 0,
            "hold_for": ["prefill", "decode"] if spec.prefill and spec.prefill_mode == "remote" else ["decode"],
        },
        "membership": {
            "host": spec.host,
            "port": membership_port,
            "siblings": [sibling],
            "mixed_fingerprints": True,
        },
        "model": {"path": str(model_dir), "name": spec.served_name or spec.model},
        "drain": {"budget_s": spec.drain_s, "hand_over": True, "accept_s": HAND_OVER_S},
    }


def controller_config(
    spec: ClusterSpec, *, controller_id: str, run_dir: Path, gateways: list[str]
) -> dict[str, object]:
    """Return the configuration of the controller as nested plain data (TOML)."""
    return {
        "controller": {
            "id": controller_id,
            "place": "local",
            "target": str(run_dir),
            "gateways": gateways,
            "secret_file": str(run_dir / "secret"),
            "run_dir": str(run_dir),
            "http_host": spec.host,
            "log_level": spec.log_level,
        },
        "autoscale": {
            # A pool that the description leaves empty may stay empty.
            "prefill_minimum": min(1, spec.prefill),
        },
    }


def process_config(
    revision: Revision,
    *,
    process_id: str,
    role: str,
    run_dir: Path,
    membership: Mapping[str, str],
    http_port: int,
    listener_fd: int,
    threads: int,
) -> dict[str, object]:
    """Return the configuration of one process. `membership`: place of a gateway -> its membership address."""
    spec, gateways = revision.spec, list(membership.values())
    match role:
        case "gateway":
            return gateway_config(
                spec,
                gateway_id=process_id,
                run_dir=run_dir,
                model_dir=revision.model_dir,
                http_port=http_port,
                listener_fd=listener_fd,
                membership_port=int(membership[process_id].rsplit(":", 1)[1]),
                sibling=next(address for other, address in membership.items() if other != process_id),
            )
        case "controller":
            return controller_config(spec, controller_id=process_id, run_dir=run_dir, gateways=gateways)
        case _:
            return worker_config(
                spec,
                role=role,
                worker_id=process_id,
                run_dir=run_dir,
                model_dir=revision.model_dir,
                gateways=gateways,
                threads=threads,
            )


def overrides(spec: ClusterSpec, role: str) -> list[str]:
    """Return the `--set` values for a role: those for all first, then its own."""
    shared = spec.sets.get("all", ()) if role in {"prefill", "decode"} else ()
    return [*shared, *spec.sets.get(role, ())]


def next_worker_id(role: str, taken: set[str]) -> str:
    """Return the free name with the lowest number, e.g. ``decode-1``."""
    number = 1
    while f"{role}-{number}" in taken:
        number += 1
    return f"{role}-{number}"


def choose_leaving(role: str, ids: list[str], count: int) -> list[str]:
    """Return which workers of a pool leave when `count` must go: the highest numbers first."""
    pool = sorted((i for i in ids if i.rsplit("-", 1)[0] == role), key=lambda i: int(i.rsplit("-", 1)[1]))
    return pool[len(pool) - count :][::-1] if count > 0 else []
