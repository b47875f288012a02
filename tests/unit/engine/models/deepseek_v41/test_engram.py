import torch

from engine.models.deepseek_v41.arithmetic import arithmetic_of
from engine.models.deepseek_v41.engram import Engram
from engine.models.deepseek_v41.formats import e4m3_decode, e8m0_decode
from tests.fakes.v41_reference import tiny, tiny_weights

torch.set_num_threads(1)
EPS = 1e-20
PLAIN = arithmetic_of(tiny(), activations=False, caches=False)
WEIGHTS = tiny_weights().layers[1].engram


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def test_a_row_is_its_codes_times_its_scales():
    rows = torch.tensor([[0, 5, 6125], [7, 7, 9]])
    got = Engram(WEIGHTS, EPS, PLAIN).look_up(rows)
    values = e4m3_decode(WEIGHTS.codes[rows]) * e8m0_decode(WEIGHTS.scales[rows]).repeat_interleave(32, -1)
    assert got.shape == (2, 96)
    assert torch.equal(got, values.flatten(1).double())
    assert got.std() > 0.5


def test_streams_gain_the_value_gated_by_how_they_agree_with_the_keys():
    streams, found = drawn(5, 4, 128), drawn(5, 192)
    got = Engram(WEIGHTS, EPS, PLAIN).forward(streams, found, None)
    projected = found @ WEIGHTS.wkv.T
    for row in range(5):
        value = projected[row, 512:]
        for i in range(4):
            x, key = streams[row, i], projected[row, 128 * i : 128 * (i + 1)]
            a = (x * WEIGHTS.q_weight[i] * WEIGHTS.k_weight[i] * key).sum() * 128**-0.5
            a = a / x.square().mean().sqrt() / key.square().mean().sqrt()
            gate = torch.sigmoid(a.sign() * a.abs().clamp(min=1e-6).sqrt())
            assert (got[row, i] - x - gate * value).abs().max() < 1e-12


def test_image_rows_pass_unchanged():
    streams, found = drawn(5, 4, 128), drawn(5, 192)
    is_image = torch.tensor([False, True, True, False, False])
    engram = Engram(WEIGHTS, EPS, PLAIN)
    got = engram.forward(streams, found, is_image)
    assert torch.equal(got[is_image], streams[is_image])
    assert torch.equal(got[~is_image], engram.forward(streams, found, None)[~is_image])
