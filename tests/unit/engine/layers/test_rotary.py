import pytest
import torch

from engine.layers.rotary import RopeScaling, Rotary, inverse_frequencies, magnitude, rotate

torch.set_num_threads(1)


def test_rotation_keeps_length_and_depends_only_on_the_distance():
    rotary = Rotary(16, 100, 10_000.0, RopeScaling(), torch.float64)
    query, key = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    dots = []
    for shift in (0, 7, 60):
        a = rotate(query, *rotary.at(torch.tensor([9 + shift])))
        b = rotate(key, *rotary.at(torch.tensor([4 + shift])))
        dots.append((a * b).sum())
        torch.testing.assert_close(a.norm(), query.norm())
    torch.testing.assert_close(dots[0], dots[1])
    torch.testing.assert_close(dots[0], dots[2])


def test_position_zero_is_left_alone():
    x = torch.randn(1, 3, 8)
    rotary = Rotary(8, 4, 10_000.0, RopeScaling(), torch.float32)
    assert torch.equal(rotate(x, *rotary.at(torch.tensor([0]))), x)


def test_linear_scaling_stretches_all_positions():
    plain = inverse_frequencies(8, 10_000.0, RopeScaling(), torch.float64)
    stretched = inverse_frequencies(8, 10_000.0, RopeScaling(kind="linear", factor=4.0), torch.float64)
    torch.testing.assert_close(stretched * 4, plain)


def test_banded_scaling_leaves_short_waves_and_stretches_long_ones():
    scaling = RopeScaling(kind="banded", factor=8.0, original_max_positions=8192)
    plain = inverse_frequencies(64, 500_000.0, RopeScaling(), torch.float64)
    scaled = inverse_frequencies(64, 500_000.0, scaling, torch.float64)
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1] * 8, plain[-1])
    assert ((scaled <= plain) & (scaled >= plain / 8)).all()


def test_yarn_scaling_sets_the_attention_temperature():
    assert magnitude(RopeScaling(kind="yarn", factor=4.0)) == pytest.approx(1.138629, abs=1e-6)
    assert magnitude(RopeScaling(kind="yarn", factor=4.0, attention_factor=1.0)) == 1.0
    assert magnitude(RopeScaling(kind="linear", factor=4.0)) == 1.0
