"""What a `cluster.yaml` means on this machine. Pure."""

from core.errors import ConfigError
from deploy.cluster_description import ROLES, ClusterDescription, PoolPart
from deploy.local.spec import ClusterSpec


def spec_of(description: ClusterDescription) -> ClusterSpec:
    """Return the local cluster of a description; raises ConfigError for what one machine cannot be.

    Ports other than HTTP are free ones that are published, and sizes of one worker (CPUs, memory) are not enforced.
    """
    if description.slices > 1 or any(description.pool(role).nodes > 1 for role in ROLES):
        raise ConfigError("slices and nodes above 1 need more than this machine; use --on ray or --on k8s")
    slo, budget = description.slo, description.budget
    drains = {role: description.drain_s(role) for role in ("gateway", *ROLES)}
    rules = [
        f"autoscale.ttft_s={slo.ttft_s!r}",
        f"autoscale.tpot_s={slo.tpot_s!r}",
        f"autoscale.budget={budget.workers}",
    ]
    for role in ROLES:
        pool = description.pool(role)
        rules += [
            f"autoscale.{role}_minimum={pool.minimum}",
            f"autoscale.{role}_maximum={pool.maximum}",
            f"autoscale.{role}_tokens_per_s={pool.tokens_per_s!r}",
        ]
    return ClusterSpec(
        model=description.model.path,
        served_name=description.model.served_name,
        prefill=description.prefill.replicas,
        decode=description.decode.replicas,
        port=description.ports.http,
        transfer=description.transfer,
        prefill_mode=description.prefill_mode,
        drain_s=max(drains.values()),
        autoscale=budget.autoscale,
        devices={role: devices for role in ROLES if (devices := _devices(description.pool(role)))},
        sets={
            "gateway": (
                f"drain.budget_s={drains['gateway']!r}",
                f"processes={description.gateway.replicas}",
                *description.gateway.sets,
            ),
            **{role: (f"drain.budget_s={drains[role]!r}", *description.pool(role).sets) for role in ROLES},
            "controller": tuple(rules),
        },
    )


def _devices(pool: PoolPart) -> tuple[str, ...]:
    return pool.devices or (("cuda",) if pool.gpus else ())
