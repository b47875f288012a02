import dataclasses

import msgspec
import torch

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.moe import Gate, Moe, RowTokens, swiglu
from tests.fakes.v41_reference import tiny, tiny_weights

torch.set_num_threads(1)
CONFIG = tiny().moe
PLAIN = arithmetic_of(tiny(), activations=False, caches=False)


def weights(**changes):
    return dataclasses.replace(tiny_weights().layers[3].moe, **changes)


def inputs(rows=9, scale=1.0):
    return scale * torch.randn(rows, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens(rows=9, image=None):
    return RowTokens(torch.arange(rows), image)


def scores_of(x, moe):
    return torch.nn.functional.softplus(x @ moe.gate.T).sqrt()


def test_biases_steer_the_choice_and_never_the_weights():
    x, bias = inputs(), torch.zeros(8, dtype=torch.float64)
    bias[6] = 100.0
    routes = Gate(weights(bias=bias), CONFIG, 2, PLAIN).forward(x, tokens())
    assert (routes.experts == 6).any(1).all()
    chosen = scores_of(x, weights()).gather(1, routes.experts)
    assert (routes.weights - 1.5 * chosen / chosen.sum(1, keepdim=True)).abs().max() < 1e-12


def test_image_rows_are_routed_by_their_own_bias():
    x, text, image = inputs(), torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    text[1], image[2] = 100.0, 100.0
    is_image = torch.arange(9) % 3 == 0
    routes = Gate(weights(bias=text, bias_vl=image), CONFIG, 2, PLAIN).forward(x, tokens(image=is_image))
    assert torch.equal((routes.experts == 2).any(1) & ~(routes.experts == 1).any(1), is_image)
    unmarked = Gate(weights(bias=text, bias_vl=image), CONFIG, 2, PLAIN).forward(x, tokens())
    assert (unmarked.experts == 1).any(1).all()


def test_ties_go_to_the_lowest_expert():
    routes = Gate(weights(gate=torch.zeros(8, 128, dtype=torch.float64), bias=None), CONFIG, 2, PLAIN).forward(
        inputs(), tokens()
    )
    assert routes.experts.tolist() == [[0, 1]] * 9


def test_a_single_expert_keeps_its_score_as_weight():
    x = inputs()
    routes = Gate(weights(), CONFIG, 1, PLAIN).forward(x, tokens())
    assert (routes.weights - 1.5 * scores_of(x, weights()).gather(1, routes.experts)).abs().max() < 1e-12


def test_hash_routing_takes_experts_from_the_table_and_weights_from_the_scores():
    x, table = inputs(), torch.stack((torch.arange(512) % 8, (torch.arange(512) + 3) % 8), 1)
    routes = Gate(weights(token_experts=table, bias=None), CONFIG, 2, PLAIN).forward(x, tokens())
    assert torch.equal(routes.experts, table[:9].sort(1).values)


def test_the_gate_is_clamped_from_above_and_the_other_half_on_both_sides():
    projected = torch.tensor([[50.0, -50.0, 2.0, 50.0, 3.0, -50.0]])
    silu = torch.nn.functional.silu
    wanted = [[silu(torch.tensor(10.0)) * 10, silu(torch.tensor(-50.0)) * 3, silu(torch.tensor(2.0)) * -10]]
    assert torch.equal(swiglu(projected, 10.0), torch.tensor(wanted))


def one_by_one(x, moe, arithmetic):
    routes = Gate(moe, CONFIG, 2, arithmetic).forward(x, tokens(len(x)))
    entering, out = arithmetic.activation(x), []
    for row in range(len(x)):
        shared = arithmetic.activation(swiglu(entering[row] @ moe.shared.w13.T, 10.0)) @ moe.shared.w2.T
        for expert, weight in zip(routes.experts[row], routes.weights[row], strict=True):
            inner = swiglu(entering[row] @ moe.w13[expert].T, 10.0) * weight
            shared = shared + arithmetic.activation(inner) @ moe.w2[expert].T
        out.append(shared)
    return torch.stack(out)


def test_the_routing_weight_enters_before_the_second_projection_is_quantized():
    x, moe, arithmetic = inputs(scale=4.0), weights(), arithmetic_of(tiny())
    got = Moe(moe, CONFIG, 2, arithmetic).forward(x, tokens())
    assert (got - one_by_one(x, moe, arithmetic)).abs().max() < 1e-12
    late = one_by_one(x, moe, PLAIN)
    assert (got - late).abs().max() > 1e-3


def test_fixed_shapes_give_the_same_rows():
    x = inputs()
    arithmetic = arithmetic_of(tiny(), fixed_shapes=True)
    fixed = Moe(weights(), CONFIG, 2, arithmetic).forward(x, tokens())
    assert (fixed - Moe(weights(), CONFIG, 2, arithmetic_of(tiny())).forward(x, tokens())).abs().max() < 1e-12


def test_weights_are_scores_when_they_are_not_normalised():
    x = inputs()
    config = msgspec.structs.replace(CONFIG, norm_top_k=False)
    routes = Gate(weights(), config, 2, PLAIN).forward(x, tokens())
    assert (routes.weights - 1.5 * scores_of(x, weights()).gather(1, routes.experts)).abs().max() < 1e-12
