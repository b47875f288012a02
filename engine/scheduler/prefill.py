"""Prefill policy: who is admitted next, who gets a reservation, and how one step's token budget is cut into chunks.

Pure functions over arrays: no clock, no pages, no sequences. All arrays of one call are parallel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.images import Spans

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Waiting sequences, in any order."""

    arrival: I64
    """Order of arrival; kept over retractions."""
    priority: I32
    """Class; lower runs first."""
    uncached: I64
    """Tokens that would have to be computed."""
    waited_tokens: I64
    """Tokens that the engine computed for others since arrival: waiting time in units of work."""
    waited_s: F64
    bypassed: I32
    """Passes in which a later arrival of the same class or below was admitted."""
    retracted: Mask
    """Was running before: comes before everything else, in order of arrival."""


def reserved(waiting: Candidates, max_bypass: int, max_bypass_s: float) -> Mask:
    """Return which candidates hold a reservation: per class the oldest of those passed over too often or too long."""
    due = (waiting.bypassed >= max(1, max_bypass)) | ((waiting.bypassed > 0) & (waiting.waited_s >= max_bypass_s))
    chosen = np.zeros(len(due), np.bool_)
    for level in np.unique(waiting.priority[due]):
        of_class = np.flatnonzero(due & (waiting.priority == level))
        chosen[of_class[np.argmin(waiting.arrival[of_class])]] = True
    return chosen


def admission_order(waiting: Candidates, has_reservation: Mask) -> I64:
    """Return candidate indices, first to admit first.

    Retracted ones by arrival; then by class, the reserved one first, then by response ratio
    (waited + uncached) / uncached in tokens, which favours short prompts and ages long ones; ties by arrival.
    """
    ratio = waiting.waited_tokens / np.maximum(1, waiting.uncached)
    level = np.where(waiting.retracted, np.iinfo(np.int32).min, waiting.priority)
    ratio = np.where(waiting.retracted, 0.0, ratio)
    return np.lexsort((waiting.arrival, -ratio, ~has_reservation, level))


def passed_over(arrival: I64, priority: I32, admitted: Mask) -> Mask:
    """Return who was overtaken in a pass: not admitted, while a later arrival of the same class or a lower one was."""
    overtaken = np.zeros(len(admitted), np.bool_)
    for level in np.unique(priority[~admitted]):
        beside = admitted & (priority >= level)
        if beside.any():
            overtaken |= ~admitted & (priority == level) & (arrival < arrival[beside].max())
    return overtaken


class PageGate:
    """Who may still be admitted in one pass. A holder of a reservation that does not fit keeps pages back.

    `margin` pages must stay available beside an admission unless nothing else is active. What is available is told
    with each question, because locking a prefix changes it.
    """

    def __init__(self, margin: int) -> None:
        self._margin = margin
        self._kept = 0
        self.is_closed = False

    def fits(self, pages: int, available: int, *, alone: bool) -> bool:
        """True if a candidate that needs `pages` may be admitted; `alone`: nothing else is active, no margin is kept."""
        return not self.is_closed and pages <= available - self._kept - (0 if alone else self._margin)

    def widen(self, pages: int) -> None:
        """An admission enlarges the margin that later ones must leave."""
        self._margin += pages

    def keep(self, pages: int) -> None:
        """A reservation that does not fit yet: others pass only beside it."""
        self._kept += pages

    def close(self) -> None:
        """Nobody else passes."""
        self.is_closed = True


def split_budget(
    start: I32, goal: I32, budget: int, page_tokens: int, images: Sequence[Spans] = (), *, first_goes_on: bool = False
) -> I32:
    """Cut `budget` query tokens into chunks, in the given order. Returns int32 [n] chunk lengths, 0 for none.

    A chunk ends on a page border unless it is the last of its prompt, and never inside one of its prompt's `images`,
    where there are any: see `_outside_images`. `first_goes_on`: the first prompt gets an image that is larger than the
    budget all the same.
    """
    lengths = np.zeros(len(start), np.int32)
    for i in range(len(start)):
        if budget <= 0:
            break
        first, last = int(start[i]), int(goal[i])
        end = min(last, first + budget)
        if end < last:
            end -= end % page_tokens
        if images and images[i] and first < end < last:
            end = _outside_images(first, end, last, budget, images[i], goes_on=first_goes_on and i == 0)
        lengths[i] = max(0, end - first)
        budget -= int(lengths[i])
    return lengths


def _outside_images(first: int, end: int, last: int, budget: int, images: Spans, *, goes_on: bool) -> int:
    """Return where a chunk ends that would end at `end`: if that is inside an image, behind it or before it.

    Behind it, if the budget allows; else before it, if anything lies between; else the image waits for a step with more
    room, unless its prompt `goes_on` whatever the budget.
    """
    for low, high in images:
        if low < end < high:
            whole = min(high, last)
            if whole - first <= budget:
                return whole
            if low > first:
                return low
            return whole if goes_on else first
    return end


def share_budget(
    start: I32, goal: I32, budget: int, page_tokens: int, oldest_share: float, *, images: Sequence[Spans] = ()
) -> I32:
    """Cut `budget` over half-computed prompts, given oldest first. Returns int32 [n] chunk lengths.

    The shortest rest goes first, so that short prompts do not queue behind a long one; the oldest is sure of a share of
    at least a page, so that it goes on whatever arrives, and takes what the others leave. If an image comes next in it
    that is larger than that, the budget is exceeded by one image at most.
    """
    remaining = goal - start
    lengths = np.zeros(len(start), np.int32)
    if not len(start):
        return lengths
    others = 1 + np.argsort(remaining[1:], kind="stable")
    kept = min(int(remaining[0]), max(page_tokens, int(budget * oldest_share)))
    of_others = [images[i] for i in others] if images else ()
    lengths[others] = split_budget(start[others], goal[others], budget - kept, page_tokens, of_others)
    left = budget - int(lengths.sum())
    lengths[:1] = split_budget(start[:1], goal[:1], left, page_tokens, images[:1], first_goes_on=True)
    return lengths


def continuing_budget(budget: int, share: float, page_tokens: int, *, others_wait: bool) -> int:
    """Return what half-computed prompts may take of a step: all, or a share of it when others could start."""
    return max(page_tokens, int(budget * share)) if others_wait else budget


def prefill_budget(chunk_tokens: int, decode_rows: int, page_tokens: int) -> int:
    """Return the query tokens left for prompts beside `decode_rows`; never less than a page, so prompts progress."""
    return max(page_tokens, chunk_tokens - decode_rows)
