import msgspec
import pytest
import torch

from core.errors import CheckpointError, ConfigError
from engine.models.deepseek_v41.exporter import export, write_shards
from engine.models.deepseek_v41.model import DeepseekModel, DraftingDeepseekModel
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.publish import published
from engine.models.deepseek_v41.random_weights import random_weights
from engine.models.registry import load_model
from tests.fakes.deepseek_configs import v4_small_config
from tests.fakes.deepseek_driver import Driver, text

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    export(directory, tiny_config(), 1)
    return directory


def test_a_v41_directory_becomes_a_drafting_model_that_replays(tiny):
    model = load_model(tiny, name="mine")
    assert isinstance(model, DraftingDeepseekModel)
    facts = model.facts
    assert (facts.name, facts.kv_dtype, facts.mode, facts.history_tokens) == ("mine", "packed-f32", "replay-8-20", 3)
    assert (facts.reuse.replay_tokens, facts.reuse.align_tokens, facts.reuse.keep_tokens) == (8, 2, 20)
    assert model.replay.mode == "compact"


def test_the_oracle_shares_kv_with_what_it_judges_and_exact_does_not(tiny):
    replay, mask, exact = (load_model(tiny, mode=mode, dtype="f64") for mode in ("replay", "mask", "exact"))
    assert replay.facts == mask.facts
    assert exact.facts.mode == "exact"
    assert not exact.facts.reuse.replays
    assert exact.facts.reuse.keep_tokens == 0
    assert (mask.replay.mode, exact.replay.mode) == ("mask", "off")


def test_wrong_modes_and_types_are_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="none of exact, replay, mask"):
        load_model(tiny, mode="fast")
    with pytest.raises(CheckpointError, match="bf16"):
        load_model(tiny, dtype="bf16")


def test_a_v4_directory_is_loaded_and_run(tmp_path):
    config = parse_config(v4_small_config())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(v4_small_config()))
    write_shards(tmp_path, published(random_weights(config, 1, torch.float32), config), 1 << 20)
    model = load_model(tmp_path)
    assert type(model) is DeepseekModel
    assert model.facts.mode == "exact"
    with pytest.raises(ConfigError, match="every layer"):
        load_model(tmp_path, mode="replay")
    driver = Driver(model, num_rows=1, max_tokens=256, page_tokens=128)
    logits = driver.step({0: text(1, 140)})[0]
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_models_without_windows_to_replay_know_no_mode(tmp_path):
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="always exact"):
        load_model(tmp_path, mode="replay")
