"""Where one sample stands in its grammar: which tokens may come next, and what each one that came does to that.

When the grammar is complete, only the ids that end a text are left. Knows no rows and no threads.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from engine.grammar.vocabulary import GrammarVocabulary

Masks = npt.NDArray[np.int32]
"""[n, words]: one mask (`engine.grammar.vocabulary.Words`) a row, C-contiguous."""


class Constraint:
    """One sample's. Used by one thread at a time."""

    __slots__ = ("_ended", "_vocabulary", "error", "matcher")

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self.matcher = matcher
        self._vocabulary = vocabulary
        self._ended = False
        self.error = ""
        """Why it cannot go on; empty as long as it can."""

    @property
    def asks_matcher(self) -> bool:
        """True if the next mask is the matcher's to say."""
        return not (self._ended or self.error)

    def consume(self, token: int) -> bool:
        """Take the next token; False, with `error` set, if it may not come. Behind the end anything may."""
        if not self.asks_matcher:
            pass
        elif token in self._vocabulary.stop_ids and self.matcher.is_accepting():
            self._ended = True
        elif self.matcher.try_consume_tokens([token]) != 1:
            self.error = self.matcher.get_error() or f"token {token} does not fit the grammar"
        return not self.error

    def fill_end(self, into: npt.NDArray[np.int32]) -> None:
        """Write the mask of what may come behind the end into `into` [words]."""
        into[:] = self._vocabulary.stops

    def check(self) -> None:
        """Look whether the matcher could say its mask; if not, `error` is set."""
        if self.matcher.is_error():
            self.error = self.matcher.get_error() or "the grammar cannot be followed any further"

    def fork(self) -> "Constraint":
        """Return another one that stands at the same place: what it takes does not move this one."""
        copy = Constraint(self.matcher.deep_copy(), self._vocabulary)
        copy._ended, copy.error = self._ended, self.error
        return copy


def fill_masks(constraints: Sequence[Constraint], masks: Masks, executor: LLExecutor) -> None:
    """Write the mask of each constraint's next token into its row of `masks`, side by side on the executor's threads.

    A matcher may find that it cannot go on: `Constraint.error` says so, and the mask means nothing.
    """
    asking = [(constraint.matcher, i) for i, constraint in enumerate(constraints) if constraint.asks_matcher]
    if asking:
        executor.unsafe_compute_mask_ptr(asking, masks.ctypes.data, 4 * masks.shape[1], len(masks))
    for constraint, into in zip(constraints, masks, strict=True):
        if constraint.asks_matcher:
            constraint.check()
        else:
            constraint.fill_end(into)
