"""The port to lower tiers (host memory, shared storage) as the tree and the scheduler see it, and its null version.

A tier names pages by page hash and moves whole pages; it knows neither the tree nor sequences. All methods are called
on the scheduler thread and never block: work is posted, and tickets are polled.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from core.ids import PageHash
from engine.cache.page_state import Pages

BoolArray = npt.NDArray[np.bool_]


class LoadTicket(Protocol):
    """One posted load; its destination pages stay LOADING until `done`."""

    def done(self) -> bool:
        """True once the loader writes no destination page any more."""
        ...

    def num_loaded(self) -> int:
        """Return the length of the leading run of pages that arrived whole and verified; final once `done`."""
        ...


class TierPort(Protocol):
    """Lower tiers of one worker."""

    def lookup(self, hashes: Sequence[PageHash]) -> BoolArray:
        """Return bool[n]: which pages a load is believed to deliver. May be wrong; a load says the truth."""
        ...

    def load(self, hashes: Sequence[PageHash], pages: Pages) -> LoadTicket:
        """Start to copy pages (equal lengths) into LOADING pages of the pool."""
        ...

    def store(self, hashes: Sequence[PageHash], pages: Pages) -> None:
        """Offer TREE pages for storing; the tier may ignore it."""
        ...


class NullTier:
    """No lower tier: it has nothing and takes nothing."""

    def lookup(self, hashes: Sequence[PageHash]) -> BoolArray:
        """Return all False."""
        return np.zeros(len(hashes), np.bool_)

    def load(self, hashes: Sequence[PageHash], pages: Pages) -> LoadTicket:
        """Raise InvariantError: nothing was ever promised."""
        raise InvariantError(f"load of {len(hashes)} pages into {len(pages)} from a tier that has none")

    def store(self, hashes: Sequence[PageHash], pages: Pages) -> None:
        """Ignore the offer."""
