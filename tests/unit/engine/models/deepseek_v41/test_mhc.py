import torch

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.mhc import Coefficients, StreamMixer, collapse, doubly_stochastic, expand, first_stream
from tests.fakes.v41_reference import tiny, tiny_weights

torch.set_num_threads(1)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def test_combinations_are_nearly_doubly_stochastic():
    comb = doubly_stochastic(drawn(50, 4, 4), 20, 1e-6)
    assert (comb.sum(1) - 1).abs().max() < 1e-5
    assert (comb.sum(2) - 1).abs().max() < 1e-3


def test_sinkhorn_follows_the_written_order():
    logits = drawn(1, 3, 3)
    comb = logits.softmax(2) + 1e-6
    comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    assert (doubly_stochastic(logits, 1, 1e-6) - comb).abs().max() < 1e-15
    comb = comb / (comb.sum(2, keepdim=True) + 1e-6)
    comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
    assert (doubly_stochastic(logits, 2, 1e-6) - comb).abs().max() < 1e-15


def test_expansion_sums_over_the_first_index_of_the_combination():
    y, streams = drawn(2, 5), drawn(2, 4, 5)
    mix = Coefficients(drawn(2, 4), drawn(2, 4) * 2, drawn(2, 4, 4))
    wanted = mix.post[:, :, None] * y[:, None] + torch.einsum("tjk,tjd->tkd", mix.comb, streams)
    assert (expand(y, streams, mix) - wanted).abs().max() < 1e-12


def test_collapse_weighs_streams_and_starts_with_the_first():
    streams = drawn(3, 4, 5)
    assert torch.equal(collapse(streams, first_stream(3, 4, streams)), streams[:, 0])
    weights = drawn(3, 4)
    assert (collapse(streams, weights) - torch.einsum("ti,tid->td", weights, streams)).abs().max() < 1e-12


def test_coefficients_share_one_statistic_over_all_streams_and_ignore_loudness():
    mixer = StreamMixer(tiny_weights().layers[0].hc_attn, tiny().mhc, tiny().norm_eps, arithmetic_of(tiny()))
    streams = drawn(6, 4, 128)
    mix, louder = mixer.forward(streams), mixer.forward(streams * 37)
    for name in ("pre", "post", "comb"):
        assert (getattr(mix, name) - getattr(louder, name)).abs().max() < 1e-12
    streams[:, 0] *= 5
    assert (mixer.forward(streams).pre - mix.pre).abs().max() > 1e-3
    assert ((mix.pre > 0) & (mix.pre < 1 + 1e-5)).all()
    assert ((mix.post > 0) & (mix.post < 2)).all()


def test_a_zero_row_stays_finite_with_the_smallest_eps():
    mixer = StreamMixer(tiny_weights().layers[0].hc_attn, tiny().mhc, tiny().norm_eps, arithmetic_of(tiny()))
    mix = mixer.forward(torch.zeros(1, 4, 128, dtype=torch.float64))
    assert mix.comb.isfinite().all()
