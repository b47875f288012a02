import msgspec
import pytest

from core.errors import CheckpointError
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config, tiny_config
from tests.fakes.deepseek_configs import v4_flash_config, v41_flash_config


def test_the_real_nested_configuration_is_read():
    config = parse_config(v41_flash_config())
    assert (config.hidden_size, config.num_layers, config.num_heads, config.head_dim) == (5120, 40, 64, 512)
    assert config.norm_eps == 1e-20
    assert config.rope_scaling.original_max_positions == 65536
    assert config.engram.num_rows == (384006168, 384016682)
    assert config.engram.num_columns == 24
    assert config.dspark.target_layers == (37, 38, 39)
    assert config.vision.num_layers == 32
    assert config.quant.block == (32, 32) and config.quant.expert_dtype == "fp4" and config.quant.fp4_sparse_kv
    assert config.mhc.pre_from_prev and not config.q_head_norm
    assert config.decoder_start == 20
    assert [stage.index for stage in config.stages] == [40, 41, 42]


def test_a_flat_configuration_says_the_same_as_a_nested_one():
    nested = v41_flash_config()
    flat = {**{k: v for k, v in nested.items() if k != "text_config"}, **nested["text_config"]}
    assert parse_config(flat) == parse_config(nested)


def test_v4s_flat_configuration_is_read():
    config = parse_config(v4_flash_config())
    assert config.is_v4 and config.q_head_norm and not config.mhc.pre_from_prev
    assert config.quant.block == (128, 128) and config.quant.expert_dtype == "fp4"
    assert config.quant.activation_group == 128
    assert config.engram is None and config.dspark is None and config.vision is None and config.candidates is None
    assert config.num_mtp_layers == 1 and config.stages == ()
    assert config.index.hadamard and config.index.own_compressor
    assert config.decoder_start == config.num_layers


@pytest.mark.parametrize("make", [tiny_config, mini_config])
def test_presets_are_valid(make):
    config = parse_config(make())
    assert config.num_layers == 14 and config.decoder_start == 8
    assert config.vision.num_layers == 2
    assert config.candidates.block_size * (config.candidates.top_blocks - 1) + 1 >= config.index.top_k


def test_tiny_serves_eight_thousand_positions():
    assert parse_config(tiny_config()).max_positions == 8192


def test_a_configuration_survives_being_encoded():
    config = parse_config(tiny_config())
    assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_the_rope_kind_are_read(key):
    raw = tiny_config()
    scaling = raw["text_config"]["rope_scaling"]
    scaling[key] = scaling.pop("type")
    assert parse_config(raw) == parse_config(tiny_config())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_key_value_heads", 2, "num_key_value_heads 2 is not supported"),
        ("attention_dropout", 0.1, "attention_dropout"),
        ("compress_ratios", [0, 0, 2], "compress_ratios has 3 entries"),
        ("qk_rope_head_dim", 15, "qk_rope_head_dim 15"),
        ("o_groups", 3, "4 heads do not divide over 3"),
        ("engram_num_embeddings", [1], "differ in length"),
        ("hidden_size", "x", "hidden_size"),
        ("hidden_size", 0, "hidden_size"),
        ("candidate_topk_blocks", 2, "cannot fill a top-k of 8"),
        ("candidate_block_size", None, "candidate_source_layer_id needs"),
        ("dspark_noise_token_id", 512, "outside the vocabulary"),
        ("num_experts_per_tok", 9, "9 of 8 experts"),
        ("rope_scaling", {"type": "linear"}, "rope_scaling type 'linear'"),
        ("rope_scaling", {"type": "yarn", "factor": 16}, "original_max_positions"),
        ("num_hash_layers", 1, "num_hash_layers"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field, value, message):
    raw = tiny_config()
    raw["text_config"][field] = value
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_config(raw, "/m/config.json")
    assert str(caught.value).startswith("/m/config.json: ")


def test_another_architecture_is_refused():
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        parse_config({"architectures": ["LlamaForCausalLM"]})


def test_an_unknown_expert_format_is_refused():
    raw = tiny_config()
    raw["quantization_config"] = {**raw["quantization_config"], "expert_dtype": "int3"}
    with pytest.raises(CheckpointError, match="int3"):
        parse_config(raw)
