"""The one cluster description: its example is its defaults, and every mistake names its field."""

from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.cluster_description import ClusterDescription, read_description

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy" / "cluster.example.yaml"


def test_the_example_says_the_defaults():
    assert read_description(EXAMPLE) == ClusterDescription()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefill: {replicas: two}", "prefill.replicas"),
        ("prefil: {replicas: 2}", "prefil"),
        ("prefill: {replicas: 9}", "outside prefill.minimum..maximum"),
        ("decode: {minimum: 0, replicas: 0}", "decode.minimum"),
        ("budget: {workers: 1}", "budget.workers is 1"),
        ("prefill_mode: remoet", "prefill_mode"),
        ("prefill: {minimum: 0, replicas: 0}", "prefill_mode is remote"),
        ("name: Not_A_Name", "name"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_mistake_names_its_field(tmp_path, text, said):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_description(path)
    assert said in raised.value.message


def test_a_grace_period_holds_pre_stop_and_drain():
    description = ClusterDescription()
    assert description.grace_s("decode") >= 6 + 600 + 5
    assert description.grace_s("prefill") >= 6 + 60 + 5
