import msgspec
import pytest
import torch

from engine.models.deepseek_v41.config import EngramConfig
from engine.models.deepseek_v41.engram_hash import (
    NO_TOKEN,
    NgramHash,
    hash_multipliers,
    hash_primes,
    is_prime,
    ngrams_of,
)
from tests.fakes.v41_reference import tiny, token_map

REAL = EngramConfig(
    layers=(1, 14), num_rows=(384006168, 384016682), max_ngram=4, vocab_size=16_000_000, num_heads=8, head_dim=256,
    pad_token_id=2, compressed_vocab_size=99_092,
)  # fmt: skip


@pytest.fixture(scope="module")
def primes():
    return hash_primes(REAL)


def test_primes_of_the_real_model_are_the_published_ones(primes):
    assert (primes[0][0], primes[0][-1], primes[1][0], primes[1][-1]) == (16000057, 16000463, 16000477, 16000889)
    assert primes[0][:4] == (16000057, 16000079, 16000081, 16000097)
    assert primes[1][:4] == (16000477, 16000487, 16000499, 16000507)
    assert tuple(sum(p) for p in primes) == REAL.num_rows


def test_primes_of_the_tiny_model_add_up_to_its_tables():
    config = tiny().engram
    assert hash_primes(config) == ((1009, 1013, 1019, 1021, 1031, 1033), (1039, 1049, 1051, 1061, 1063, 1069))
    assert NgramHash(config, token_map()).num_rows == config.num_rows


def test_multipliers_are_the_published_ones():
    assert hash_multipliers(1, REAL) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert hash_multipliers(14, REAL) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    small = tiny().engram
    assert hash_multipliers(1, small) == (25312092204715445, 1598643339462077, 11877719498229879, 24438510811423417)
    assert hash_multipliers(4, small) == (27171098617865603, 1664016290499501, 24328227015100263, 6260917600735559)


def test_rows_of_a_known_history_are_the_published_ones():
    rows = NgramHash(REAL, torch.arange(99_092)).rows(torch.tensor([[5, 17, 1234, 99_091]]))
    columns = [0, 1, 7, 8, 16, 23]
    assert rows[0, 0, columns].tolist() == [3889985, 30570021, 118891433, 140663316, 260246306, 381583050]
    assert rows[1, 0, columns].tolist() == [897380, 16353005, 120779290, 131003039, 265628164, 381161989]


def test_an_ngram_ends_at_the_first_position_without_a_token():
    table = NgramHash(tiny().engram, token_map())
    pad = tiny().engram.pad_token_id
    cut = table.rows(torch.tensor([[7, 8, NO_TOKEN, 9], [7, NO_TOKEN, 8, 9], [NO_TOKEN, 7, 8, 9]]))
    padded = table.rows(torch.tensor([[7, 8, pad, pad], [7, pad, pad, pad], [pad] * 4]))
    assert torch.equal(cut, padded)


def test_rows_lie_in_their_columns_and_stay_positive_for_the_largest_ids(primes):
    table = NgramHash(REAL, torch.arange(99_092))
    generator = torch.Generator().manual_seed(0)
    ngrams = torch.cat((torch.full((1, 4), 99_091), torch.randint(0, 99_092, (200, 4), generator=generator)))
    for rows, layer in zip(table.rows(ngrams), primes, strict=True):
        top = torch.tensor(layer).cumsum(0)
        assert (rows >= top - torch.tensor(layer)).all()
        assert (rows < top).all()


def test_ngrams_of_a_run_are_its_tokens_newest_first():
    ngrams = ngrams_of(torch.tensor([10, 11, 12, 13, 14]), 2, 4)
    assert ngrams.tolist() == [[12, 11, 10, NO_TOKEN], [13, 12, 11, 10], [14, 13, 12, 11]]


def test_primality_is_decided_right_around_known_cases():
    small = [n for n in range(60) if is_prime(n)]
    assert small == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]
    assert not is_prime(3215031751)  # a strong pseudoprime to bases 2, 3, 5 and 7
    assert is_prime(2**61 - 1)


def test_other_heights_of_tables_do_not_change_the_hash():
    other = msgspec.structs.replace(tiny().engram, num_rows=(1, 1))
    ngrams = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(NgramHash(other, token_map()).rows(ngrams), NgramHash(tiny().engram, token_map()).rows(ngrams))
