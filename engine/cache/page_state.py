"""The states a page can be in, and the array types that name pages. Vocabulary of the cache; no behaviour."""

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.events import SeqId

Pages = npt.NDArray[np.int32]
PagesLike = Pages | Sequence[int]
PageIndex = npt.NDArray[np.intp]
"""Pages as numpy likes to index with: no conversion at every use."""

NOBODY = SeqId(-1)


class PageState(enum.IntEnum):
    """Who may touch a page (architecture A3)."""

    FREE = 0
    PRIVATE = 1
    """Of one sequence; its forwards may write."""
    LOADING = 2
    """Of one sequence; a lower tier writes."""
    LANDING = 3
    """Of one sequence; our own open transfer reads write into it."""
    UNPROVEN = 4
    """Of an ended sequence; a transfer may still write."""
    TREE = 5
    """Of the prefix tree; immutable."""
    FENCED = 6
    """Of nobody; a launched step may still touch it."""
    SINK = 7


OWNED_STATES = (PageState.PRIVATE, PageState.LOADING, PageState.LANDING, PageState.UNPROVEN)
