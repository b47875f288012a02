import itertools

import pytest
import torch

from engine.models.deepseek_v41.formats import (
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    e8m0_ceil,
    e8m0_decode,
    pack_nibbles,
    unpack_nibbles,
)

torch.set_num_threads(1)
ALL = torch.arange(256, dtype=torch.uint8)


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1 if code >> 7 else 1, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def nearest_even(value: float, table: list[float]) -> float:
    """By definition: the table's magnitudes in order, ties to the even position."""
    magnitude = min(abs(value), table[-1])
    best = min(range(len(table)), key=lambda i: (abs(table[i] - magnitude), i % 2))
    return -table[best] if value < 0 else table[best]


def test_every_e4m3_code_means_what_the_format_says():
    expected = torch.tensor([e4m3_value(code) for code in range(256)])
    assert torch.equal(e4m3_decode(ALL).nan_to_num(-1e9), expected.nan_to_num(-1e9))
    assert torch.isnan(e4m3_decode(ALL)).nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_every_e4m3_code_survives_a_round_trip():
    numbers = ALL[~torch.isnan(e4m3_decode(ALL))]
    assert torch.equal(e4m3_encode(e4m3_decode(numbers)), numbers)


def test_e4m3_rounds_to_nearest_even_and_saturates():
    table = [e4m3_value(code) for code in range(127)]
    probes = list(table)
    for low, high in itertools.pairwise(table):
        middle = (low + high) / 2
        probes += [middle, middle * (1 + 1e-6), middle * (1 - 1e-6)]
    probes += [449.0, 1e9, 2.0**-11]
    values = torch.tensor(probes + [-p for p in probes], dtype=torch.float64)
    expected = [nearest_even(float(v), table) for v in values]
    assert e4m3_decode(e4m3_encode(values)).tolist() == expected


def test_every_e2m1_code_means_what_the_format_says():
    assert e2m1_decode(ALL[:16]).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(e2m1_encode(e2m1_decode(ALL[:16])), ALL[:16])


def test_e2m1_rounds_to_nearest_even_and_saturates():
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    probes = [i / 64 for i in range(64 * 7)] + [1e9]
    values = torch.tensor(probes + [-p for p in probes])
    assert e2m1_decode(e2m1_encode(values)).tolist() == [nearest_even(float(v), table) for v in values]


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)]
)
def test_the_seven_ties_of_e2m1(value, rounded):
    assert e2m1_decode(e2m1_encode(torch.tensor([value, -value]))).tolist() == [rounded, -rounded]


def test_the_even_index_is_in_the_low_nibble():
    assert pack_nibbles(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


def test_packing_nibbles_is_a_bijection():
    assert torch.equal(pack_nibbles(unpack_nibbles(ALL)), ALL)
    pairs = torch.cartesian_prod(ALL[:16], ALL[:16])
    assert torch.equal(unpack_nibbles(pack_nibbles(pairs)), pairs)


def test_every_e8m0_code_means_what_the_format_says():
    decoded = e8m0_decode(ALL).double()
    assert decoded[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert torch.isnan(decoded[255])


def test_e8m0_takes_the_next_power_of_two():
    exact = e8m0_decode(ALL[1:254])
    assert torch.equal(e8m0_ceil(exact), ALL[1:254])
    above = torch.nextafter(exact, torch.tensor(float("inf")))
    assert torch.equal(e8m0_ceil(above), ALL[2:255])
    below = torch.nextafter(exact[1:], torch.tensor(0.0))
    assert torch.equal(e8m0_ceil(below), ALL[2:254])
