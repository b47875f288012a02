import numpy as np
import pytest
import torch
from torch.nn import functional

from core.errors import BadRequest
from core.image_plan import Spot, plan_size
from engine.models.deepseek_v41.vision.encoder import image_rules, patches_of
from engine.models.deepseek_v41.vision.vit import apply
from tests.fakes.vision import random_pixels, tiny_encoder, tiny_rules, tiny_vision

torch.set_num_threads(1)


def encode(pixels, dtype=torch.float64):
    return tiny_encoder(dtype).encode(torch.from_numpy(pixels))


def test_patches_are_those_of_a_convolution_over_normalised_pixels():
    _, weights = tiny_vision()
    pixels = torch.from_numpy(random_pixels(1, 28, 42))
    values = (pixels.double() / 127.5 - 1).permute(2, 0, 1)[None]
    kernel = weights.patch.weight.reshape(-1, 3, 14, 14)
    expected = functional.conv2d(values, kernel, weights.patch.bias, stride=14)[0].flatten(1).T
    assert (apply(weights.patch, patches_of(pixels, 14, torch.float64)) - expected).abs().max() < 1e-12


def test_learned_rows_stand_at_the_start_the_ends_of_rows_and_the_end():
    _, weights = tiny_vision()
    pixels = random_pixels(2, 70, 84)
    plan = plan_size(84, 70, tiny_rules())
    span = encode(pixels)
    assert (plan.rows, plan.columns) == (2, 2)
    assert span.shape == (8, 128)
    learned = {Spot.START: weights.start, Spot.NEW_LINE: weights.new_line, Spot.END: weights.end}
    for row, spot in zip(span, plan.spots(), strict=True):
        if spot in learned:
            assert torch.equal(row, learned[spot])


def test_a_cell_beside_another_lies_beside_it_in_the_span():
    pixels = random_pixels(3, 84, 84)
    changed = pixels.copy()
    changed[42:, :42] ^= 255  # the second row's first cell
    moved = (encode(pixels) - encode(changed)).abs().amax(1)
    cells = moved[[1, 2, 4, 5]]
    assert int(cells.argmax()) == 2
    assert float(moved[[0, 3, 6, 7]].max()) == 0


def test_single_precision_is_near_double():
    pixels = random_pixels(4, 84, 126)
    double = encode(pixels)
    assert (encode(pixels, torch.float32).double() - double).abs().max() < 1e-4 * double.abs().max()


def test_the_same_pixels_give_the_same_bits():
    pixels = random_pixels(5, 56, 98)
    assert torch.equal(encode(pixels, torch.float32), encode(pixels.copy(), torch.float32))


def test_a_size_that_is_no_multiple_of_the_patch_is_refused():
    with pytest.raises(BadRequest, match="multiple of 14"):
        encode(np.zeros((15, 28, 3), np.uint8))


def test_the_budget_is_that_of_the_configuration():
    rules = image_rules(tiny_vision()[0])
    assert (rules.patch, rules.downsample, rules.max_tokens, rules.min_pixels) == (14, 3, 40, 7056)
