"""How many drafts a step should verify, and which: the confidence-scheduled half of speculation.

A draft's survival is the product of the confidences up to it. The budget is the number of drafts, over all rows, that
maximises expected tokens per second; the most likely survivors fill it, which in each row is a prefix. Whether a draft
is verified never depends on its own value or on later ones, so any budget gives the same output. Pure but for
`StepTimes`, which remembers what steps took; knows no clock.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_SMOOTHING = 0.1
_KINDS_OF_STEPS = 2
"""Different step sizes that must have been timed before times mean anything."""


def survivals(confidences: F32) -> F32:
    """Return the survival float32 [b, k] of every draft; NaN (no draft) and what follows it survive with 0."""
    return np.cumprod(np.nan_to_num(confidences, nan=0.0), axis=1, dtype=np.float32)


def choose_budget(survival: F32, num_rows: int, seconds: Callable[[I64], F64]) -> int:
    """Return how many drafts to verify beside the `num_rows` tokens that are computed anyway.

    `survival` [b, k]; `seconds` maps query tokens of a step to its time, elementwise. Ties: the smaller budget.
    """
    ordered = np.sort(survival[survival > 0].astype(np.float64))[::-1]
    expected = num_rows + np.concatenate(([0.0], np.cumsum(ordered)))
    sizes = num_rows + np.arange(len(expected), dtype=np.int64)
    return int(np.argmax(expected / seconds(sizes)))


def verify_lengths(survival: F32, budget: int) -> I32:
    """Return the number of drafts int32 [b] that each row verifies: the `budget` most likely survivors of all.

    Ties: lower row first, then lower position; drafts that cannot survive are left out.
    """
    flat = survival.reshape(-1)
    chosen = np.zeros(len(flat), np.bool_)
    chosen[np.argsort(-flat, kind="stable")[: max(0, budget)]] = True
    return (chosen & (flat > 0)).reshape(survival.shape).sum(axis=1, dtype=np.int32)


class StepTimes:
    """Smoothed step times by number of query tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        """Count one step."""
        if tokens > 0 and seconds > 0:
            size = _bucket(tokens)
            known = self._seconds.get(size, seconds)
            self._seconds[size] = known + (seconds - known) * _SMOOTHING

    @property
    def are_known(self) -> bool:
        """True if steps of different sizes were timed."""
        return len(self._seconds) >= _KINDS_OF_STEPS

    def seconds(self, tokens: I64) -> F64:
        """Return the expected times: straight between timed sizes, constant beyond them, never falling with size."""
        sizes = sorted(self._seconds)
        times = np.maximum.accumulate([self._seconds[size] for size in sizes])
        return np.interp(tokens, sizes, times)


def _bucket(tokens: int) -> int:
    """Return the size under which a step is remembered: exact when small, to an eighth of a power of two beyond."""
    grain = max(1, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // grain) * grain
