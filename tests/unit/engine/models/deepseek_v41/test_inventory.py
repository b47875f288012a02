import pytest

from engine.models.deepseek_v41.inventory import inventory
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import mini_config, tiny_config
from tests.fakes.deepseek_configs import v4_flash_config, v41_flash_config


def listed(raw):
    return {spec.name: spec for spec in inventory(parse_config(raw))}


def test_the_real_checkpoint_has_the_published_number_of_tensors_and_bytes():
    specs = list(inventory(parse_config(v41_flash_config())))
    assert len(specs) == len({spec.name for spec in specs}) == 96_085
    assert sum(spec.num_bytes for spec in specs) == 510_286_023_000


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.hc_attn_fn", "F32", (24, 20480)),
        ("layers.2.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("layers.39.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.39.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.7.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("vision.blocks.31.attn.wqkv.bias", "BF16", (3072,)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
    ],
)
def test_tensors_of_the_real_checkpoint(name, dtype, shape):
    spec = listed(v41_flash_config())[name]
    assert (spec.dtype, spec.shape) == (dtype, shape)


def test_only_owners_have_compressors_and_indexers():
    names = listed(v41_flash_config())
    assert "layers.20.attn.compressor.wgate.weight" not in names
    assert "layers.3.attn.compressor.wkv.weight" not in names
    assert "layers.24.attn.indexer.wk.weight" not in names
    assert "layers.24.attn.indexer.wq_b.weight" in names
    assert not any("hc_head" in name or name.endswith((".ape", "tid2eid")) for name in names)


def test_v4_has_its_own_forms():
    names = listed(v4_flash_config())
    assert names["layers.2.attn.compressor.ape"].shape == (4, 1024)
    assert names["layers.2.attn.indexer.compressor.wkv.weight"].shape == (256, 4096)
    assert names["layers.3.attn.compressor.wkv.weight"].shape == (512, 4096)
    assert "layers.3.attn.indexer.wq_b.weight" not in names
    assert names["layers.0.ffn.gate.tid2eid"].shape == (129280, 6)
    assert "layers.0.ffn.gate.bias" not in names and "layers.3.ffn.gate.bias" in names
    assert names["hc_head_fn"].shape == (4, 16384)
    assert "mtp.0.hc_head_fn" in names and "mtp.0.e_proj.scale" in names
    assert not any("bias_vl" in name for name in names)


def test_experts_may_be_in_eight_bits():
    raw = tiny_config()
    raw["quantization_config"] = {**raw["quantization_config"], "expert_dtype": "fp8"}
    names = listed(raw)
    assert names["layers.0.ffn.experts.0.w1.weight"].dtype == "F8_E4M3"
    assert names["layers.0.ffn.experts.0.w1.scale"].shape == (2, 4)


@pytest.mark.parametrize(("make", "least", "most"), [(tiny_config, 6e6, 7e6), (mini_config, 3e8, 6e8)])
def test_generated_models_stay_small(make, least, most):
    assert least < sum(spec.num_bytes for spec in inventory(parse_config(make()))) < most
