import torch

from engine.layers.norm import RMSNorm

torch.set_num_threads(1)


def test_it_equals_torch_and_does_not_depend_on_the_batch():
    x, weight = torch.randn(37, 576), torch.randn(576)
    norm = RMSNorm(weight, 1e-5)
    whole = norm.forward(x)
    torch.testing.assert_close(whole, torch.nn.functional.rms_norm(x, (576,), weight, 1e-5))
    for size in (1, 2, 5, 16, 36):
        assert torch.equal(norm.forward(x[:size].clone()), whole[:size])


def test_bfloat16_is_normalised_in_float32():
    x = torch.full((1, 8), 300.0, dtype=torch.bfloat16)
    assert torch.equal(RMSNorm(torch.ones(8, dtype=torch.bfloat16), 0.0).forward(x), torch.ones_like(x))
