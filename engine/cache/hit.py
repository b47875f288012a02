"""What a match says, and which lengths of it a model may build on.

A hit is a snapshot: it stays true until pages leave the tree, and `PrefixTree.lock` refuses it from then on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from core.ids import PageHash
from engine.cache.page_state import Pages
from engine.cache.tier import BoolArray

Legality = Callable[[BoolArray], BoolArray]
"""Maps `present` bool[m] (page i can be had: on the device or from a tier) to bool[m+1]: which lengths are legal."""


def every_prefix(present: BoolArray) -> BoolArray:
    """Legal are all lengths whose pages are all present: the model keeps nothing but pages."""
    legal = np.ones(len(present) + 1, np.bool_)
    np.logical_and.accumulate(present, out=legal[1:])
    return legal


def only_nothing(present: BoolArray) -> BoolArray:
    """Legal is length 0 only: the model keeps state per row (ring, recurrent) that no page holds."""
    legal = np.zeros(len(present) + 1, np.bool_)
    legal[0] = True
    return legal


@dataclass(frozen=True, slots=True)
class Hit:
    """Result of `PrefixTree.match` over m page hashes."""

    hashes: Sequence[PageHash]
    pages: Pages
    """int32[num_device]: the leading pages that are on the device; read only."""
    legal: BoolArray
    """bool[m+1]: lengths in pages that may be used, 0 always among them; beyond `num_device` they need a load."""
    version: int
    """Of the tree, at the time of the match."""

    @property
    def num_device(self) -> int:
        """Leading pages on the device."""
        return len(self.pages)

    def longest_on_device(self, limit: int) -> int:
        """Return the largest legal length of at most `limit` pages that needs no load."""
        return int(np.flatnonzero(self.legal[: max(0, min(limit, len(self.pages))) + 1])[-1])

    def longest(self, limit: int) -> int:
        """Return the largest legal length of at most `limit` pages, loads included."""
        return int(np.flatnonzero(self.legal[: max(limit, 0) + 1])[-1])
