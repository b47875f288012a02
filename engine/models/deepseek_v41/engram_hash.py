"""Which rows of the n-gram tables a token looks up: a multiplicative hash of the last tokens, modulo distinct primes.

A pure function of token ids. N-grams end at the beginning of the sequence and never reach over an image. Knows no table
contents.
"""

from collections.abc import Iterable

import numpy as np
import torch

from engine.models.deepseek_v41.config import EngramConfig

NO_TOKEN = -1
"""Stands for a position before the sequence or inside an image: it and everything older counts as padding."""
_SEED_STEP = 10_007
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(n: int) -> bool:
    """Return whether n is prime (Miller-Rabin with witnesses that decide every 64-bit number)."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, a, odd, twos) for a in _WITNESSES)


def _passes(n: int, witness: int, odd: int, twos: int) -> bool:
    x = pow(witness, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False


def hash_primes(config: EngramConfig) -> tuple[tuple[int, ...], ...]:
    """Return per layer the primes of its columns: n-gram length outermost, heads inside; no prime is used twice."""
    seen: set[int] = set()
    layers: list[tuple[int, ...]] = []
    for _ in config.layers:
        primes: list[int] = []
        for _ in range(config.max_ngram - 1):
            at = config.vocab_size - 1
            for _ in range(config.num_heads):
                at = next(n for n in _above(at) if n not in seen and is_prime(n))
                seen.add(at)
                primes.append(at)
        layers.append(tuple(primes))
    return tuple(layers)


def _above(n: int) -> Iterable[int]:
    while True:
        n += 1
        yield n


def hash_multipliers(layer: int, config: EngramConfig) -> tuple[int, ...]:
    """Return the odd multiplier of every n-gram position, newest first; their products with ids fit in 63 bits."""
    bound = max(1, ((2**63 - 1) // config.compressed_vocab_size) // 2)
    drawn = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, config.max_ngram, np.int64)
    return tuple(2 * int(m) + 1 for m in drawn)


class NgramHash:
    """The hash of all engram layers; `token_map` int64 [vocab] are compressed ids."""

    def __init__(self, config: EngramConfig, token_map: torch.Tensor) -> None:
        primes = torch.tensor(hash_primes(config), dtype=torch.int64)
        self._primes = primes.view(len(config.layers), config.max_ngram - 1, config.num_heads)
        offsets = primes.cumsum(1) - primes
        self._offsets = offsets.view_as(self._primes)
        multipliers = [hash_multipliers(layer, config) for layer in config.layers]
        self._multipliers = torch.tensor(multipliers, dtype=torch.int64)
        self._map = token_map
        self._pad = int(token_map[config.pad_token_id])
        self.history = config.max_ngram - 1
        """Tokens before a row that its n-grams reach back to."""
        self.num_rows = tuple(int(n) for n in primes.sum(1))
        """Rows that each layer's table must have."""

    def columns(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Return multipliers int64 [max_ngram], primes and offsets int64 [columns], and the padding id of one table."""
        return self._multipliers[number], self._primes[number].flatten(), self._offsets[number].flatten(), self._pad

    def rows(self, ngrams: torch.Tensor) -> torch.Tensor:
        """Return int64 [layers, t, columns]: table rows of each engram layer.

        `ngrams` int64 [t, max_ngram]: token ids, the row's own first, then older ones; `NO_TOKEN` where there is none.
        """
        alive = (ngrams >= 0).cumprod(1).bool()
        compressed = torch.where(alive, self._map[ngrams.clamp(min=0)], self._pad)
        products = compressed[None] * self._multipliers[:, None, :]
        mixed = products[:, :, 0]
        columns: list[torch.Tensor] = []
        for i in range(self._primes.shape[1]):
            mixed = mixed ^ products[:, :, i + 1]
            columns.append(mixed[:, :, None] % self._primes[:, None, i] + self._offsets[:, None, i])
        return torch.cat(columns, 2)


def ngrams_of(token_ids: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """Return int64 [t - first, length] for `NgramHash.rows`: n-grams of tokens `first`.. of one run of ids [t].

    Before the run there is nothing: give as many ids before `first` as n-grams reach back, or `NO_TOKEN`.
    """
    padded = torch.cat((token_ids.new_full((length - 1,), NO_TOKEN), token_ids))
    return padded.unfold(0, length, 1)[first:].flip(1)
