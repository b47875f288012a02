import numpy as np
import pytest

from engine.philox import GUMBEL_MAX, gumbel, philox4x32, uniform

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers_of_the_random123_distribution(counter, key, expected):
    words = philox4x32(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(w[0]) for w in words) == expected


def plain_uniform(token, seed, position, sample, stream):
    counter = [position, sample, token // 4, stream]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(p1 >> 32) ^ counter[1] ^ key[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ counter[3] ^ key[1], p0 & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return ((counter[token % 4] >> 9) + 0.5) / 2**23


def test_dense_and_scattered_ids_get_the_same_noise_as_plain_integers_say():
    seed, position, sample, stream = 0xFEDCBA9876543210, 4321, 3, 1
    dense = uniform(np.arange(70_000), seed, position, sample, stream)
    scattered = np.array([0, 5, 63, 64, 1000, 65_535, 69_999])
    sparse = uniform(scattered, seed, position, sample, stream)
    truth = [plain_uniform(int(v), seed, position, sample, stream) for v in scattered]
    assert sparse.tolist() == truth
    assert dense[scattered].tolist() == truth
    part = uniform(np.arange(6, 23), seed, position, sample, stream)
    assert part.tolist() == dense[6:23].tolist()


def test_every_counter_word_and_both_key_words_matter():
    ids = np.arange(8)
    base = (7, 11, 2, 0)
    changed = [(8, 11, 2, 0), (7 + 2**40, 11, 2, 0), (7, 12, 2, 0), (7, 11, 3, 0), (7, 11, 2, 1)]
    results = {uniform(ids, *args).tobytes() for args in (base, *changed)}
    assert len(results) == 6


def test_noise_is_finite_bounded_and_has_the_moments_of_a_gumbel_variable():
    noise = gumbel(np.arange(400_000), 99, 1, 0)
    assert np.isfinite(noise).all()
    assert noise.max() <= GUMBEL_MAX
    assert abs(noise.mean() - 0.57722) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02


def test_no_ids_give_no_noise():
    assert gumbel(np.zeros(0, np.int64), 1, 2, 3).shape == (0,)
