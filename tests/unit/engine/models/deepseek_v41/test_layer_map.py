import pytest

from core.errors import CheckpointError, ConfigError
from engine.models.deepseek_v41.layer_map import Sources, build_layers, check_page_tokens
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from tests.fakes.deepseek_configs import v4_flash_config, v41_flash_config


def modes(layers):
    return " ".join({"window": "w", "full": "F", "reuse": "r", "reindex": "I"}[layer.mode] for layer in layers)


def test_the_real_map_is_the_published_one():
    layers = parse_config(v41_flash_config()).layers
    assert modes(layers) == "w w " + "F r r r r r " * 3 + "F r r r " + "I r r r " * 3 + "I r r r"
    assert [layer.m for layer in layers] == [0, 0, *[2] * 18, *[1] * 20]
    sources = [(layer.kv_source, layer.index_source) for layer in layers]
    assert sources[:2] == [(None, None)] * 2
    assert sources[2:8] == [(2, 2)] * 6
    assert sources[14:20] == [(14, 14)] * 6
    assert sources[20:24] == [(20, 20)] * 4
    assert sources[24:28] == [(20, 24)] * 4
    assert sources[36:40] == [(20, 36)] * 4
    assert [layer.index for layer in layers if layer.has_engram] == [1, 14]
    assert [layer.index for layer in layers if layer.is_captured] == [37, 38, 39]
    assert [layer.index for layer in layers if layer.is_candidate_source] == [20]
    assert [layer.index for layer in layers if layer.uses_candidates] == [24, 28, 32, 36]
    assert [layer.index for layer in layers if layer.owns_kv] == [2, 8, 14, 20]
    assert [layer.index for layer in layers if layer.owns_index_keys] == [2, 8, 14, 20]
    assert [layer.index for layer in layers if layer.owns_index_query] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [layer.rope for layer in layers] == ["window"] * 2 + ["compress"] * 38


def test_the_tiny_map_has_every_mode():
    layers = parse_config(tiny_config()).layers
    assert modes(layers) == "w w F r r F r r F r I r I r"
    assert [layer.index for layer in layers if layer.uses_candidates] == [10, 12]


def test_draft_stages_only_have_windows():
    for stage in parse_config(tiny_config()).stages:
        assert stage.mode == "window" and stage.rope == "window" and not stage.has_engram


def test_v4_layers_own_what_they_read():
    layers = parse_config(v4_flash_config()).layers
    assert modes(layers) == "w w" + " F" * 41
    assert all(layer.kv_source == layer.index for layer in layers[2:])
    assert [layer.index_source for layer in layers[2:6]] == [2, None, 4, None]
    assert [layer.overlap for layer in layers[:5]] == [False, False, True, False, True]
    assert not layers[3].owns_index_keys and layers[4].owns_index_keys
    assert [layer.index for layer in layers if layer.hash_routed] == [0, 1, 2]


GOOD = {"ratios": (0, 2, 2, 1, 1, 1), "kv": (1, 3), "index": (1, 3, 5), "candidate": 3}


def test_a_small_map_without_candidates_is_built():
    layers = build_layers(Sources(**{**GOOD, "candidate": None}))
    assert modes(layers) == "w F r F r I"
    assert not any(layer.uses_candidates for layer in layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate": 4}, "candidate_source_layer_id 4 is not in index_source_layer_ids"),
        ({"kv": (0, 1, 3)}, "kv_source_layer_ids names layer 0, whose compress ratio is 0"),
        ({"index": (0, 1, 3)}, "index_source_layer_ids names layer 0, whose compress ratio is 0"),
        ({"kv": (3, 1)}, "not strictly ascending"),
        ({"kv": (1, 3, 6)}, "outside 0..5"),
        ({"engram": (9,)}, "engram_layer_ids names a layer outside"),
        ({"kv": (3,)}, "layer 1 has compress ratio 2 but no KV"),
        ({"kv": (1,)}, "layer 3 with compress ratio 1 would read entries of layer 1 with ratio 2"),
        ({"index": (1, 5), "candidate": None}, "layer 3 reads entries of layer 3 by a selection of layer 1"),
        ({"index_keys": (1,)}, "index_k_source_layer_ids differs"),
        ({"candidate": 1}, "layer 3 .ratio 1. takes candidates of layer 1 .ratio 2."),
        ({"ratios": (0, 1, 1, 1, 1, 1), "candidate": 1}, "takes candidates of layer 1 but its own entries"),
    ],
)
def test_contradicting_lists_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        build_layers(Sources(**{**GOOD, **change}))


def test_a_page_must_not_split_a_group():
    layers = parse_config(tiny_config()).layers
    check_page_tokens(layers, 16)
    with pytest.raises(ConfigError, match="a page of 15 tokens splits the groups of 2 tokens of layer 2"):
        check_page_tokens(layers, 15)
