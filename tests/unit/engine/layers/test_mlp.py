import torch
from torch.nn import functional

from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP

torch.set_num_threads(1)


def block(width=64, inner=1500):
    generator = torch.Generator().manual_seed(2)
    shapes = [(inner, width), (inner, width), (width, inner)]
    return [torch.randn(*shape, generator=generator) * 0.1 for shape in shapes]


def test_it_is_down_of_gated_up():
    gate, up, down = block()
    x = torch.randn(21, 64)
    mlp = GatedMLP(Linear(gate), Linear(up), Linear(down))
    truth = (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    for flag in (False, True):
        torch.testing.assert_close(mlp.forward(x, deterministic=flag), truth, atol=1e-4, rtol=1e-4)


def test_a_deterministic_row_has_the_same_bits_in_every_batch_with_one_and_two_threads():
    mlp = GatedMLP(*(Linear(w) for w in block()))
    x = torch.randn(50, 64)
    whole = mlp.forward(x, deterministic=True)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for size in (1, 2, 7, 16, 17, 33):
                part = mlp.forward(x[50 - size :].clone(), deterministic=True)
                assert torch.equal(part, whole[50 - size :])
    finally:
        torch.set_num_threads(1)
