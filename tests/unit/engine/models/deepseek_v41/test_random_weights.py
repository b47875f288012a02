import hashlib

import torch

from engine.models.deepseek_v41.quantize import Q4, decode_blocks, encode_blocks, fake
from engine.models.deepseek_v41.random_weights import random_weights
from tests.fakes.v41_reference import SEED, tiny, tiny_weights

torch.set_num_threads(1)


def test_values_are_those_that_their_formats_hold():
    weights = tiny_weights()
    layer = weights.layers[2]
    for dense in (layer.attn.wq_b, layer.attn.wo_a.flatten(0, 1), layer.moe.shared.w2, weights.dspark.main_proj):
        assert torch.equal(decode_blocks(*encode_blocks(dense, (32, 32)), (32, 32)).double(), dense)
    assert torch.equal(fake(Q4(32), layer.moe.w13), layer.moe.w13)
    for half in (weights.embed, weights.head, layer.attn_norm, layer.moe.gate, layer.attn.compressor.wgate):
        assert torch.equal(half.bfloat16().double(), half)
    assert torch.equal(layer.hc_attn.fn.float().double(), layer.hc_attn.fn)


def test_a_seed_gives_the_same_weights_everywhere():
    weights = random_weights(tiny(), SEED, torch.float32)
    digest = hashlib.sha256()
    for tensor in (
        weights.embed,
        weights.layers[8].moe.w2,
        weights.layers[1].engram.codes,
        weights.layers[5].attn.sink,
    ):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == "3d7d08d5a45c4b30"
    assert torch.equal(weights.layers[8].moe.w2.double(), tiny_weights().layers[8].moe.w2)
    other = random_weights(tiny(), SEED + 1, torch.float32)
    assert not torch.equal(other.embed, weights.embed)


def test_no_part_is_constant():
    weights = tiny_weights()
    layer = weights.layers[8]
    for tensor in (layer.attn.sink, layer.hc_attn.base, layer.hc_ffn.scale, layer.moe.bias, layer.moe.bias_vl):
        assert tensor.std() > 0.01
