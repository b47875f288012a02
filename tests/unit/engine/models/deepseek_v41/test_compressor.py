import torch

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.compressor import Compressor, hadamard
from engine.models.deepseek_v41.layer_map import FULL, LayerPlan
from engine.models.deepseek_v41.norm import rms
from engine.models.deepseek_v41.weights import CompressorWeights
from tests.fakes.v41_reference import tiny

torch.set_num_threads(1)
EPS = 1e-20


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64)


def compressor(m, *, overlap=False, width=6, ape=False):
    out = width * (2 if overlap else 1)
    weights = CompressorWeights(
        wkv=drawn(out, 8, seed=1),
        wgate=drawn(out, 8, seed=2) if m > 1 else None,
        norm=drawn(width, seed=3),
        ape=drawn(m, out, seed=4) if ape else None,
    )
    plan = LayerPlan(index=0, mode=FULL, m=m, kv_source=0, overlap=overlap)
    return Compressor(weights, plan, tiny(), arithmetic_of(tiny())), weights


def test_a_pair_is_weighed_per_channel_by_the_softmax_of_its_gates():
    pooling, weights = compressor(2)
    x = drawn(4, 8)
    pending = pooling.project(x, torch.arange(4))
    got = pooling.pool(pending.unflatten(0, (2, 2)), torch.ones(2, 2, dtype=torch.bool))
    for j in range(2):
        values, gates = x[2 * j : 2 * j + 2] @ weights.wkv.T, x[2 * j : 2 * j + 2] @ weights.wgate.T
        wanted = rms((gates.exp() / gates.exp().sum(0) * values).sum(0), weights.norm, EPS)
        assert (got[j] - wanted).abs().max() < 1e-12


def test_a_group_of_one_has_no_gate():
    pooling, weights = compressor(1)
    x = drawn(3, 8)
    pending = pooling.project(x, torch.arange(3))
    assert pending.shape == (3, 1, 6)
    assert pooling.pending_width == 0
    got = pooling.pool(pending[:, None], torch.ones(3, 1, dtype=torch.bool))
    assert (got - rms(x @ weights.wkv.T, weights.norm, EPS)).abs().max() < 1e-12


def test_overlapping_groups_read_the_first_half_before_and_the_second_half_of_their_own():
    pooling, weights = compressor(4, overlap=True, ape=True)
    x, positions = drawn(8, 8), torch.arange(8)
    pending = pooling.project(x, positions)
    values, gates = pending.unbind(1)
    assert (gates - x @ weights.wgate.T - weights.ape.repeat(2, 1)).abs().max() < 1e-12
    exists = torch.ones(2, 8, dtype=torch.bool)
    exists[0, :4] = False
    garbage = torch.full_like(pending[:4], torch.nan)
    got = pooling.pool(torch.stack((torch.cat((garbage, pending[:4])), pending)), exists)
    alone = rms((gates[:4, 6:].softmax(0) * values[:4, 6:]).sum(0), weights.norm, EPS)
    assert (got[0] - alone).abs().max() < 1e-12
    both_gates = torch.cat((gates[:4, :6], gates[4:, 6:]))
    both = torch.cat((values[:4, :6], values[4:, 6:]))
    assert (got[1] - rms((both_gates.softmax(0) * both).sum(0), weights.norm, EPS)).abs().max() < 1e-12


def test_the_hadamard_rotation_is_its_own_inverse_and_keeps_products():
    x, y = drawn(3, 32), drawn(3, 32, seed=9)
    assert (hadamard(hadamard(x)) - x).abs().max() < 1e-12
    assert ((hadamard(x) * hadamard(y)).sum(1) - (x * y).sum(1)).abs().max() < 1e-12
    unit = torch.zeros(1, 4, dtype=torch.float64)
    unit[0, 1] = 2
    assert hadamard(unit).tolist() == [[1, -1, 1, -1]]
