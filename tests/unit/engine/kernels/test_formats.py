"""The formats of kernels are those of the model, bit by bit, and packed layouts keep every value."""

import pytest
import torch

from engine.kernels.reference import formats
from engine.models.deepseek_v41.formats import pack_nibbles
from engine.models.deepseek_v41.quantize import Q4, Q8, Q4Kv


def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    spread = torch.randint(-20, 20, (64, 1), generator=generator)
    x = torch.randn(64, 512, generator=generator) * 2.0**spread
    x[0] = 0
    # Exactly on every border of e2m1 and e4m3, with either sign.
    x[1, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * torch.tensor([1.0, -1.0] * 8)
    x[2, :4] = torch.tensor([2.34375, 4.6875, 9.375, 11.25])
    return x.bfloat16()


@pytest.mark.parametrize(
    ("ours", "theirs", "is_packed"),
    [(formats.q8, Q8(32), False), (formats.q4, Q4(32), True), (formats.q4kv, Q4Kv(16), True)],
)
def test_quantizers_equal_the_models(ours, theirs, is_packed):
    codes, scales = theirs.encode(values())
    got_codes, got_scales = ours(values())
    assert torch.equal(got_scales, scales)
    assert torch.equal(got_codes, pack_nibbles(codes) if is_packed else codes)


def test_decoding_undoes_encoding_as_the_model_does():
    x = values()
    assert torch.equal(formats.decode_q8(*formats.q8(x)), Q8(32).rounded(x))
    assert torch.equal(formats.decode_q4(*formats.q4(x)), Q4(32).rounded(x))
    assert torch.equal(formats.decode_q4kv(*formats.q4kv(x)), Q4Kv(16).rounded(x))


def test_tiles_of_weights_keep_every_code_and_scale():
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (2, 128, 128), dtype=torch.uint8, generator=generator)
    scales = torch.randint(62, 189, (2, 128, 8), dtype=torch.uint8, generator=generator)
    words, spread = formats.tiled(packed, scales)
    assert words.shape == (2, 2, 2, 64, 16)
    back = formats.untiled(words, spread)
    assert torch.equal(back[0], packed)
    assert torch.equal(back[1], scales)


def test_thirds_of_a_weight_sum_to_it_exactly():
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(2))
    high, middle, low = formats.thirds(weight).float()
    assert torch.equal((low + middle) + high, weight)
