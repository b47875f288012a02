import pytest
import torch

from core.errors import CheckpointError, InvariantError
from engine.models.deepseek_v41.formats import e8m0_decode
from engine.models.deepseek_v41.loader import read_weights
from engine.models.deepseek_v41.packed import read_experts, read_linear
from engine.models.deepseek_v41.parse import parse_config
from engine.models.deepseek_v41.presets import tiny_config
from engine.models.deepseek_v41.publish import published
from engine.models.deepseek_v41.quantize import decode_blocks
from engine.models.deepseek_v41.random_weights import random_weights

torch.set_num_threads(1)


class Source:
    def __init__(self, tensors):
        self.tensors = tensors

    def get(self, name):
        return self.tensors[name]


@pytest.fixture(scope="module")
def config():
    return parse_config(tiny_config())


@pytest.fixture(scope="module")
def tensors(config):
    return dict(published(random_weights(config, 5, torch.float32), config))


@pytest.fixture(scope="module")
def weights(config, tensors):
    return read_weights(Source(tensors), config, torch.float32)


def test_projections_of_one_input_become_one_matrix(config, tensors, weights):
    names = ["layers.2.attn.wq_a", "layers.2.attn.wkv"]
    fused = read_linear(Source(tensors), names, config.quant.block)
    attn = weights.layers[2].attn
    assert fused.codes.shape == (128, 128) and fused.scales.shape == (4, 4)
    assert torch.equal(fused.decode(), torch.cat((attn.wq_a, attn.wkv)))


def test_scales_are_spread_over_the_rows_of_their_block(config, tensors):
    linear = read_linear(Source(tensors), ["layers.0.attn.wkv"], config.quant.block)
    spread = e8m0_decode(linear.row_scales()).repeat_interleave(32, 1)
    ones = torch.full_like(linear.codes, 0x38)
    assert torch.equal(spread, decode_blocks(ones, linear.scales, linear.block))


def test_a_ranks_experts_are_stacked_in_their_bits(config, tensors, weights):
    packed = read_experts(Source(tensors), "layers.3.ffn", range(2, 6), config)
    assert packed.w13.shape == (4, 128, 64) and packed.w2_scales.shape == (4, 128, 2)
    moe = weights.layers[3].moe
    for i, expert in enumerate(range(2, 6)):
        w13, w2 = packed.decode(i)
        assert torch.equal(w13, moe.w13[expert]) and torch.equal(w2, moe.w2[expert])


def test_scales_that_are_numbers_become_exponents(config, tensors):
    name = "layers.0.attn.wq_b"
    numbers = {**tensors, f"{name}.scale": tensors[f"{name}.scale"].float()}
    expected = read_linear(Source(tensors), [name], config.quant.block)
    assert torch.equal(read_linear(Source(numbers), [name], config.quant.block).scales, expected.scales)


def test_scales_that_are_no_powers_of_two_are_refused(config, tensors):
    name = "layers.0.attn.wq_b"
    numbers = {**tensors, f"{name}.scale": tensors[f"{name}.scale"].float() * 1.5}
    with pytest.raises(CheckpointError, match=f"tensor {name}.scale has scales that are no powers of two"):
        read_linear(Source(numbers), [name], config.quant.block)


def test_experts_of_eight_bits_are_not_packed(config, tensors):
    name = "layers.0.ffn.experts.0.w1.weight"
    eight = {**tensors, name: torch.zeros(64, 128).to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match=f"tensor {name} has eight bits"):
        read_experts(Source(eight), "layers.0.ffn", range(1), config)


def test_a_matrix_is_not_continued_within_a_block(config):
    parts = {"a.weight": torch.zeros(40, 32, dtype=torch.uint8), "a.scale": torch.zeros(2, 1, dtype=torch.uint8)}
    with pytest.raises(InvariantError, match="no whole blocks"):
        read_linear(Source(parts), ["a", "a"], config.quant.block)
