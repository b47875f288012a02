import pytest
import torch
from torch.nn import functional

from engine.layers.linear import Linear

torch.set_num_threads(1)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["f32", "f64"])
def case(request):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(200, 576, dtype=request.param, generator=generator)
    x = torch.randn(40, 576, dtype=request.param, generator=generator)
    return weight, x


def test_a_deterministic_row_has_the_same_bits_at_every_batch_size_and_place(case):
    weight, x = case
    linear = Linear(weight)
    whole = linear.forward(x, deterministic=True)
    for size in range(1, 41):
        for start in range(0, 41 - size, 3):
            part = linear.forward(x[start : start + size].clone(), deterministic=True)
            assert torch.equal(part, whole[start : start + size])


def test_the_plain_product_does_depend_on_the_batch_size(case):
    # The negative control: without tiles the test above would fail on this machine.
    weight, x = case
    whole = functional.linear(x, weight)
    parts = [functional.linear(x[:size].clone(), weight) for size in range(1, 40)]
    if all(torch.equal(part, whole[: len(part)]) for part in parts):
        pytest.skip("this machine's matrix kernels happen to be batch-invariant")


def test_both_forms_agree_and_add_the_bias(case):
    weight, x = case
    bias = torch.arange(200, dtype=x.dtype)
    linear = Linear(weight, bias)
    fast, tiled = (linear.forward(x, deterministic=flag) for flag in (False, True))
    torch.testing.assert_close(fast, tiled)
    torch.testing.assert_close(fast, x @ weight.T + bias)


def test_no_rows_give_no_rows():
    assert Linear(torch.zeros(5, 4)).forward(torch.zeros(0, 4), deterministic=True).shape == (0, 5)
