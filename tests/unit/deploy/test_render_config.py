"""Which transports a rendered worker tries: what was run, and TCP behind what was not."""

import pytest

from deploy.cluster_description import ClusterDescription, PoolPart
from deploy.render_config import transports


@pytest.mark.parametrize(
    ("transfer", "gpus", "order"),
    [
        ("auto", 0, ["tcp"]),
        ("auto", 1, ["auto"]),
        ("tcp", 1, ["tcp"]),
        ("nixl", 0, ["nixl"]),
        ("nixl", 1, ["nixl", "tcp"]),
    ],
)
def test_transports_of_a_pool(transfer, gpus, order):
    assert transports(ClusterDescription(transfer=transfer), PoolPart(gpus=gpus)) == order
