"""A cluster.yaml on this machine."""

from pathlib import Path

import msgspec
import pytest

from core.config import load
from core.errors import ConfigError
from decode_worker.config import DecodeWorkerConfig
from deploy.cluster_description import ClusterDescription, PoolPart, read_description
from deploy.controller.config import ControllerConfig
from deploy.local.described import spec_of
from deploy.local.spec import check_spec, overrides
from gateway.config import GatewayConfig
from prefill_worker.config import PrefillWorkerConfig

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy" / "cluster.example.yaml"
KINDS = {
    "gateway": GatewayConfig,
    "prefill": PrefillWorkerConfig,
    "decode": DecodeWorkerConfig,
    "controller": ControllerConfig,
}
NEEDED = {"gateway": ["model.path=m"], "controller": [], "prefill": ["worker.id=w", "model.path=m"]}


def test_the_example_is_a_cluster_of_this_machine():
    spec = spec_of(read_description(EXAMPLE))
    check_spec(spec)
    assert (spec.prefill, spec.decode, spec.port, spec.model, spec.drain_s) == (1, 1, 8000, "smollm2", 600.0)
    assert "drain.budget_s=60.0" in spec.sets["prefill"]


@pytest.mark.parametrize("role", sorted(KINDS))
def test_every_setting_of_a_description_is_one_of_its_process(role):
    spec = spec_of(ClusterDescription(decode=PoolPart(replicas=2, sets=("engine.num_pages=64",))))
    load(KINDS[role], None, [*NEEDED.get(role, NEEDED["prefill"]), *overrides(spec, role)])


def test_more_than_one_machine_is_refused_with_a_place_to_go():
    description = msgspec.structs.replace(ClusterDescription(), slices=2)
    with pytest.raises(ConfigError, match="--on ray or --on k8s"):
        spec_of(description)


def test_devices_of_a_pool_are_those_listed_or_with_gpus_the_first():
    description = ClusterDescription(
        prefill=PoolPart(devices=("cuda:0", "cuda:1")), decode=PoolPart(gpus=1), gateway=ClusterDescription().gateway
    )
    assert spec_of(description).devices == {"prefill": ("cuda:0", "cuda:1"), "decode": ("cuda",)}
    assert spec_of(ClusterDescription()).devices == {}
