"""What the ranks of one worker group tell each other before each launch, and the trivial group of one."""

import enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


class Exchange(enum.IntEnum):
    """Columns of the exchanged int32[12]."""

    TOKENS = 0
    ROWS = 1
    MODE = 2
    MAX_LEN_BUCKET = 3
    REPLAY_ROWS = 4
    GRAPH_OK = 5
    SPECULATION_OK = 6
    GRAMMAR = 7
    PREFILL_WISH = 8
    FREE_PAGES = 9
    STEP = 10
    FLAGS = 11


class GroupBarrier(Protocol):
    """Meets all ranks of a group once per pass."""

    def exchange(self, mine: I32) -> I32:
        """Give this rank's row int32[12], return the group's agreed row. A positive TOKENS means that all launch."""
        ...


class SoloBarrier:
    """A group of one rank."""

    def exchange(self, mine: I32) -> I32:
        """Return `mine`."""
        return mine
