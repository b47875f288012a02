"""The configuration file of every service of one cluster description, for places where each runs on a host of its own.

Pure. What differs from process to process (its name, its address) comes with `--set` on its command line.
"""

from dataclasses import dataclass

from core.config import to_toml
from deploy.cluster_description import PRE_STOP_S, ROLES, ClusterDescription, PoolPart, PortsPart
from engine.models.builtin import BUILTIN_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where files lie and how members find each other at a place."""

    place: str
    """Whose actuator the controller uses; empty: nobody sizes the pools there."""
    secret_file: str
    models: str
    """Folder with built-in models, one subfolder each."""
    run_dir: str
    gateways: str
    """Host name of all gateways; every address that it has is one."""
    controller_target: str
    shares_hosts: bool
    """Several workers of a host: they take free ports and publish them."""


K8S = Site(
    place="k8s",
    secret_file="/etc/tandem/secret/secret",  # noqa: S106 - a path
    models="/models",
    run_dir="/run/tandem",
    gateways="gateway-members",
    controller_target="tandem",
    shares_hosts=False,
)
METAL = Site(
    place="",
    secret_file="/etc/tandem/secret",  # noqa: S106 - a path
    models="/var/lib/tandem/models",
    run_dir="/run/tandem",
    gateways="tandem-gateways",
    controller_target="",
    shares_hosts=True,
)


def service_configs(description: ClusterDescription, site: Site) -> dict[str, str]:
    """Return `ROLE.toml` -> text for the gateway, both pools and, if the place has one, the controller."""
    trees = {
        "gateway": gateway_tree(description, site),
        **{role: worker_tree(description, site, role) for role in ROLES},
        **({"controller": controller_tree(description, site)} if site.place else {}),
    }
    return {f"{role}.toml": to_toml(tree) for role, tree in trees.items()}


def model_path(description: ClusterDescription, site: Site) -> str:
    """Return the model's directory as the processes see it."""
    path = description.model.path
    return f"{site.models}/{path}" if path in BUILTIN_NAMES else path


def model_name(description: ClusterDescription) -> str:
    """Return the name that clients use."""
    return description.model.served_name or description.model.path


def members(description: ClusterDescription, site: Site) -> list[str]:
    """Return the membership addresses that workers and controllers are given."""
    return [f"dns:{site.gateways}:{description.ports.membership}"]


def transports(description: ClusterDescription, pool: PoolPart) -> list[str]:
    """Return the transports of a pool in order of preference.

    Hosts share no memory, so `auto` is TCP; with GPUs it stays `auto`: CUDA IPC where it reaches the peer's, else TCP.
    What is named gets TCP behind it with GPUs, because no native library has moved KV between GPUs of two hosts here.
    """
    wanted = description.transfer
    if not pool.gpus:
        return ["tcp"] if wanted == "auto" else [wanted]
    return [wanted] if wanted in {"auto", "tcp"} else [wanted, "tcp"]


def gateway_tree(description: ClusterDescription, site: Site) -> dict[str, object]:
    """Return the gateway's configuration as nested plain data."""
    ports = description.ports
    return {
        "id": "gateway",
        "secret_file": site.secret_file,
        "http": {"host": "0.0.0.0", "port": ports.http},  # noqa: S104 - the network policy decides who reaches it
        "membership": {
            "host": "0.0.0.0",  # noqa: S104 - as above
            "port": ports.membership,
            # Rolling updates have both; such workers are never paired.
            "mixed_fingerprints": True,
        },
        "listener": {"host": "0.0.0.0", "port": ports.metrics},  # noqa: S104 - as above
        "model": {"path": model_path(description, site), "name": model_name(description)},
        "drain": {"budget_s": description.drain_s("gateway"), "accept_s": PRE_STOP_S},
    }


def worker_tree(description: ClusterDescription, site: Site, role: str) -> dict[str, object]:
    """Return the configuration of one pool's workers as nested plain data."""
    pool = description.pool(role)
    ports = PortsPart(worker=0, metrics=0, transfer=0) if site.shares_hosts else description.ports
    tree: dict[str, object] = {
        "worker": {
            "id": role,
            "host": "0.0.0.0",  # noqa: S104 - the network policy decides who reaches it
            "port": ports.worker,
            "http_port": ports.metrics,
            "gateways": members(description, site),
            "secret_file": site.secret_file,
        },
        "model": {
            "path": model_path(description, site),
            "name": model_name(description),
            "threads": max(1, int(pool.cpus)),
            **({"device": "cuda"} if pool.gpus else {}),
        },
        "transfer": {"transports": transports(description, pool), "host": "0.0.0.0", "port": ports.transfer},  # noqa: S104 - as above
        "drain": {"budget_s": description.drain_s(role)},
    }
    if role == "decode":
        tree["prefill"] = {"mode": description.prefill_mode}
    return tree


def controller_tree(description: ClusterDescription, site: Site) -> dict[str, object]:
    """Return the controller's configuration as nested plain data."""
    prefill, decode, slo = description.prefill, description.decode, description.slo
    return {
        "controller": {
            "id": "controller",
            "place": site.place,
            "target": site.controller_target,
            "gateways": members(description, site),
            "secret_file": site.secret_file,
            "run_dir": site.run_dir,
            "advisory": not description.budget.autoscale,
            "http_host": "0.0.0.0",  # noqa: S104 - as above
            "http_port": description.ports.metrics,
        },
        "autoscale": {
            "budget": description.budget.workers,
            "ttft_s": slo.ttft_s,
            "tpot_s": slo.tpot_s,
            "prefill_minimum": prefill.minimum,
            "prefill_maximum": prefill.maximum,
            "decode_minimum": decode.minimum,
            "decode_maximum": decode.maximum,
            "prefill_tokens_per_s": prefill.tokens_per_s,
            "decode_tokens_per_s": decode.tokens_per_s,
        },
    }
