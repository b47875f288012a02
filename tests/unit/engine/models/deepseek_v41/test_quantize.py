import pytest
import torch

from engine.models.deepseek_v41.formats import e2m1_encode, e4m3_decode, e8m0_decode
from engine.models.deepseek_v41.quantize import Q4, Q8, Q4Kv, decode_blocks, encode_blocks, fake

torch.set_num_threads(1)
V = torch.tensor(
    [0, 0.1, -0.3, 0.7, 1.3, -2.2, 3.1, -4.9, 0.05, 0.2, 0.4, 0.6, 0.9, 1.1, 1.6, 2.6], dtype=torch.float64
)
ALL = [Q8(32), Q8(64), Q8(128), Q4(32), Q4Kv(16)]


def draw(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_vector_of_compressed_entries():
    _, scales = Q4Kv(16).encode(V)
    assert e4m3_decode(scales).tolist() == [0.8125]
    expected = [0, 0, -0.40625, 0.8125, 1.21875, -2.4375, 3.25, -4.875]
    expected += [0, 0, 0.40625, 0.40625, 0.8125, 1.21875, 1.625, 2.4375]
    assert fake(Q4Kv(16), V).tolist() == expected


def test_vector_of_eight_bit_groups():
    values = torch.cat((V, 3 * V))
    _, scales = Q8(32).encode(values)
    assert e8m0_decode(scales).tolist() == [2**-4]
    expected = [0, 0.1015625, -0.3125, 0.6875, 1.25, -2.25, 3, -5]
    expected += [0.05078125, 0.203125, 0.40625, 0.625, 0.875, 1.125, 1.625, 2.5]
    assert fake(Q8(32), values)[:16].tolist() == expected


def test_vector_of_four_bit_groups():
    values = torch.cat((V, V / 8))
    _, scales = Q4(32).encode(values)
    assert e8m0_decode(scales).tolist() == [1]
    expected = [0, 0, -0.5, 0.5, 1.5, -2, 3, -4, 0, 0, 0.5, 0.5, 1, 1, 1.5, 3]
    assert fake(Q4(32), values)[:16].tolist() == expected


def test_compressed_entries_multiply_by_the_rounded_reciprocal():
    values = torch.zeros(16)
    values[:4] = torch.tensor([2.34375, 4.6875, 9.375, 11.25])
    _, scales = Q4Kv(16).encode(values)
    assert e4m3_decode(scales).tolist() == [1.875]
    assert fake(Q4Kv(16), values)[:3].tolist() == [2.8125, 5.625, 11.25]


def test_reciprocal_and_division_agree_at_ties_for_all_other_scales():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.arange(1, 127, dtype=torch.uint8)
    scale = e4m3_decode(codes)[:, None]
    multiplied, divided = e2m1_encode(ties * scale * scale.reciprocal()), e2m1_encode(ties * scale / scale)
    differ = (multiplied != divided).nonzero().tolist()
    assert {int(codes[i]) & 7 for i, _ in differ if codes[i] >= 8} == {7}
    assert {float(ties[j]) for i, j in differ if codes[i] >= 8} == {1.25, 2.5, 5.0}


@pytest.mark.parametrize("quantizer", ALL, ids=repr)
def test_rounding_moves_a_value_by_a_fraction_of_its_group(quantizer):
    values = draw(7, 256) * torch.logspace(0, 2, 7, dtype=torch.float64)[:, None]
    error = (fake(quantizer, values) - values).abs().unflatten(-1, (-1, quantizer.group)).amax(-1)
    most = values.abs().unflatten(-1, (-1, quantizer.group)).amax(-1)
    assert bool((error <= most * (1 / 4 if not isinstance(quantizer, Q8) else 1 / 16)).all())


@pytest.mark.parametrize("quantizer", ALL, ids=repr)
def test_groups_of_zeros_and_of_tiny_values_stay_finite(quantizer):
    values = torch.zeros(2, 128)
    values[1] = 1e-30
    result = fake(quantizer, values)
    assert bool(torch.isfinite(result).all()) and result[0].abs().max() == 0


@pytest.mark.parametrize("quantizer", ALL, ids=repr)
def test_results_are_exact_in_bfloat16(quantizer):
    result = fake(quantizer, draw(5, 256).float())
    assert torch.equal(result.bfloat16().float(), result)


@pytest.mark.parametrize("quantizer", ALL, ids=repr)
def test_the_dtype_of_the_values_is_kept_and_does_not_change_the_result(quantizer):
    values = draw(3, 128).bfloat16()
    double = fake(quantizer, values.double())
    assert double.dtype == torch.float64
    assert torch.equal(fake(quantizer, values).double(), double)


@pytest.mark.parametrize("quantizer", ALL, ids=repr)
def test_a_group_does_not_depend_on_its_neighbours(quantizer):
    values = draw(4, 256)
    alone = torch.cat([fake(quantizer, part) for part in values.split(quantizer.group, -1)], -1)
    assert torch.equal(fake(quantizer, values), alone)


def test_a_group_whose_maximum_is_an_exact_power_does_not_waste_a_bit():
    values = torch.zeros(32)
    values[0] = 448.0
    assert e8m0_decode(Q8(32).encode(values)[1]).tolist() == [1]
    values[0] = 448.5
    assert e8m0_decode(Q8(32).encode(values)[1]).tolist() == [2]


def test_blocks_share_a_scale_and_may_be_cut_at_the_edge():
    weight = draw(40, 70)
    codes, scales = encode_blocks(weight, (32, 32))
    assert codes.shape == (40, 70) and scales.shape == (2, 3)
    back = decode_blocks(codes, scales, (32, 32))
    assert (back - weight).abs().max() <= weight.abs().max() / 16
    most = weight[32:, 64:].abs().max()
    assert e8m0_decode(scales)[1, 2] == 2.0 ** torch.ceil(torch.log2(most / 448))


def test_blocks_that_hold_representable_values_come_back_bit_for_bit():
    codes, scales = encode_blocks(draw(64, 64), (32, 32))
    once = decode_blocks(codes, scales, (32, 32))
    assert torch.equal(decode_blocks(*encode_blocks(once, (32, 32)), (32, 32)), once)


@pytest.mark.parametrize("quantizer", [Q8(32), Q8(64), Q4(32), Q4Kv(16)])
def test_rounding_is_decoding_what_was_encoded(quantizer):
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(64, 128, generator=generator) * 2.0 ** torch.randint(-20, 20, (64, 1), generator=generator)
    values[0] = 0
    # Group maxima at exact powers of two times the format's largest value.
    values[1] = 448.0
    values[2] = 6.0 * 2.0**-4
    assert torch.equal(quantizer.rounded(values), quantizer.decode(*quantizer.encode(values)))
