"""Philox4x32-10 (Salmon et al., Random123) and the Gumbel noise of decision A20, vectorised over token ids in numpy.

Counter words, in the paper's order c0..c3: (absolute position p, sample index s, token id v div 4, stream); key words
k0, k1 are the low and the high half of the 64-bit seed; token v takes output lane v mod 4. Every noise value is
therefore a pure function of (seed, p, s, v): no state, no order of calls, random access to single ids.
Knows nothing of logits or requests.
"""

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

TARGET_STREAM = 0
"""Stream of the noise that draft and target model share."""
DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = 1, 2, 3
"""Streams of the chain rule, whose draft is drawn, judged and replaced independently of the target's own choice."""
GUMBEL_MAX = float(-np.log(-np.log((2.0**23 - 0.5) * 2.0**-23))) + 1e-6
"""No noise value is above this (u has 23 bits); the margin covers rounding of the logarithms."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_BLOCK = 16_384
"""Counters per pass: the working set stays in the second-level cache."""


def philox4x32(counter: tuple[U64, U64, U64, U64], key: tuple[int, int], rounds: int = 10) -> tuple[U64, U64, U64, U64]:
    """Return the four output words of every counter. Words are 32-bit values in uint64 arrays of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0 = c0 * np.uint64(_M0)
        p1 = c2 * np.uint64(_M1)
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _32) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _words(groups: U64, seed: int, position: int, sample: int, stream: int) -> U64:
    """Return uint64 [n, 4]: the output lanes of token groups (v div 4)."""
    out = np.empty((len(groups), 4), np.uint64)
    for start in range(0, len(groups), _BLOCK):
        part = groups[start : start + _BLOCK]
        ones = np.ones(1, np.uint64)
        counter = (ones * np.uint64(position), ones * np.uint64(sample), part, ones * np.uint64(stream))
        lanes = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
        for lane in range(4):
            out[start : start + _BLOCK, lane] = lanes[lane]
    return out


def uniform(ids: I64, seed: int, position: int, sample: int, stream: int = TARGET_STREAM) -> F64:
    """Return u of A20 for `ids` (ascending, [n]): ((x >> 9) + 0.5) * 2**-23, exact in float64, never 0 or 1."""
    if len(ids) == 0:
        return np.zeros(0, np.float64)
    first, last = int(ids[0]) // 4, int(ids[-1]) // 4
    if last - first < len(ids):
        # Dense ids share groups: compute each group once.
        words = _words(np.arange(first, last + 1, dtype=np.uint64), seed, position, sample, stream)
        picked = words.reshape(-1)[ids - 4 * first]
    else:
        words = _words((ids >> 2).astype(np.uint64), seed, position, sample, stream)
        picked = words[np.arange(len(ids)), ids & 3]
    return ((picked >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23


def gumbel(ids: I64, seed: int, position: int, sample: int, stream: int = TARGET_STREAM) -> F64:
    """Return G = -log(-log u) for `ids` (ascending, [n]), in float64.

    u is exact on every platform; the two logarithms are correctly rounded up to one unit in the last place, which can
    change a choice only where two perturbed logits agree to about 1e-15.
    """
    return -np.log(-np.log(uniform(ids, seed, position, sample, stream)))
