import pytest

from core.config import dump, load
from core.errors import ConfigError
from gateway.config import GatewayConfig


def test_a_model_directory_is_all_that_must_be_named():
    config = load(GatewayConfig, None, ["model.path=/m"])
    assert (config.http.port, config.membership.port, config.membership.ttl_s) == (8000, 9500, 3.0)
    assert config.routing.policy == "prefix"
    with pytest.raises(ConfigError, match=r"model"):
        load(GatewayConfig, None, [])


def test_the_resolved_configuration_reads_back_equal(tmp_path):
    config = load(GatewayConfig, None, ["model.path=/m", 'membership.siblings=["a:1", "b:2"]', "routing.tie_s=0.5"])
    path = tmp_path / "gateway.toml"
    path.write_text(dump(config))
    assert load(GatewayConfig, path, []) == config


@pytest.mark.parametrize(
    "wrong",
    [
        "routing.policy=best",
        "routing.prefill_tokens_per_s=0",
        "limits.max_in_flight=0",
        "retries.max_failures=0",
        "links.ack_s=5",
        "http.port=70000",
        "membership.ttl_s=-1",
        "retries.pause_s=-0.1",
        "nonsense.key=1",
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=wrong.partition("=")[0].split(".")[0]):
        load(GatewayConfig, None, ["model.path=/m", wrong])
