import msgspec
import pytest
import torch

from engine.models.deepseek_v41.attention import attend
from engine.models.deepseek_v41.config import YarnScaling
from engine.models.deepseek_v41.rope import RopeTables, rotate
from tests.fakes.v41_reference import tiny

torch.set_num_threads(1)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def one_by_one(queries, keys, valid, sink):
    """The definition, head by head."""
    out = torch.zeros_like(queries)
    for row in range(queries.shape[0]):
        seen = keys[row][valid[row]]
        for head in range(queries.shape[1]):
            weights = (seen @ queries[row, head] * queries.shape[2] ** -0.5).exp()
            out[row, head] = (weights[:, None] * seen).sum(0) / (weights.sum() + sink[head].exp())
    return out


def test_attention_is_one_softmax_with_a_sink_in_the_denominator():
    queries, keys, sink = drawn(4, 3, 16), drawn(4, 7, 16), drawn(3)
    valid = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    assert (attend(queries, keys, valid, sink) - one_by_one(queries, keys, valid, sink)).abs().max() < 1e-12


def test_shared_keys_give_what_the_same_keys_per_row_give():
    queries, keys, sink = drawn(4, 3, 16), drawn(7, 16), drawn(3)
    valid = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    assert (
        attend(queries, keys, valid, sink) - attend(queries, keys.expand(4, 7, 16), valid, sink)
    ).abs().max() < 1e-12


def test_a_row_without_keys_yields_zeros_and_unseen_keys_may_hold_anything():
    queries, keys, sink = drawn(2, 3, 16), drawn(2, 7, 16), drawn(3)
    valid = torch.zeros(2, 7, dtype=torch.bool)
    valid[0, :3] = True
    expected = attend(queries, keys, valid, sink)
    keys[0, 3:] = torch.nan
    keys[1] = torch.inf
    got = attend(queries, keys, valid, sink)
    assert torch.equal(got, expected)
    assert (got[1] == 0).all()
    assert attend(queries, keys[:, :0], valid[:, :0], sink).eq(0).all()


def test_very_large_scores_and_sinks_stay_finite():
    queries, keys = torch.full((1, 1, 4), 1e3), torch.full((1, 2, 4), 1e3)
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert (attend(queries, keys, valid, torch.tensor([-1e4])) - 1e3).abs().max() < 1e-3
    assert attend(queries, keys, valid, torch.tensor([1e7])).abs().max() < 1e-3


def real_rope():
    return msgspec.structs.replace(
        tiny(), rope_dim=64,
        rope_scaling=YarnScaling(factor=16, beta_fast=32, beta_slow=1, original_max_positions=65536),
    )  # fmt: skip


def test_long_frequencies_are_the_published_ones():
    turn = RopeTables(real_rope(), 2, torch.float64).at("compress", torch.tensor([1]))
    angles = torch.atan2(turn.sin, turn.cos)[0]
    wanted = {0: 1.0, 15: 3.635538584e-3, 16: 2.265625e-3, 20: 2.969777783e-4, 25: 5.372312671e-6, 31: 5.680529037e-7}
    for i, angle in wanted.items():
        assert abs(angles[i] / angle - 1) < 1e-9, i


def test_short_frequencies_have_no_scaling():
    turn = RopeTables(real_rope(), 2, torch.float64).at("window", torch.tensor([1]))
    wanted = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert (torch.atan2(turn.sin, turn.cos)[0] / wanted - 1).abs().max() < 1e-12


def test_neighbours_turn_as_complex_numbers_in_the_last_dimensions_only():
    tables, x = RopeTables(tiny(), 64, torch.float64), drawn(5, 3, 24)
    positions = torch.tensor([0, 1, 7, 40, 63])
    turn = tables.at("window", positions)
    got = rotate(x, turn)
    assert torch.equal(got[..., :8], x[..., :8])
    turned = torch.view_as_complex(x[..., 8:].unflatten(-1, (8, 2)).contiguous())
    wanted = torch.view_as_real(turned * torch.complex(turn.cos, turn.sin)[:, None]).flatten(-2)
    assert (got[..., 8:] - wanted).abs().max() < 1e-12
    assert (rotate(got, turn, inverse=True) - x).abs().max() < 1e-12
    assert torch.equal(rotate(x[:, 0], turn), got[:, 0])


def test_tables_grow_to_the_same_bits_and_no_further_than_the_model():
    grown, whole = (RopeTables(real_rope(), 40_000, torch.float32) for _ in range(2))
    at = torch.tensor([0, 1, 8191, 8192, 20_000, 39_999])
    whole.at("compress", at)
    for position in at.tolist():
        one = grown.at("compress", torch.tensor([position]))
        both = whole.at("compress", torch.tensor([position, 3]))
        assert torch.equal(one.cos[0], both.cos[0])
        assert torch.equal(one.sin[0], both.sin[0])
    with pytest.raises(IndexError):
        grown.at("compress", torch.tensor([40_000]))
