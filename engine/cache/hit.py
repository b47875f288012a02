"""What a match says, which lengths of it a model may build on, and what it must compute again behind one.

A hit is a snapshot: it stays true until pages leave the tree, and `PrefixTree.lock` refuses it from then on.
"""

import enum
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


class ReuseKind(enum.StrEnum):
    """What a cached prefix is good for."""

    NONE = "none"
    """For nothing: the model keeps state per row that no page holds, or is to be exact."""
    PAGES = "pages"
    """Pages are all there is: computing goes on behind them."""
    REPLAY = "replay"
    """The last rows before the end of a hit are computed again, to rebuild windows; their pages are not written."""


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """How a model deals with a cached prefix and with long prompts (A10). Units: tokens."""

    kind: ReuseKind = ReuseKind.PAGES
    replay_tokens: int = 0
    """REPLAY: rows before the end of a hit that are computed again; nothing below them is seen by windows."""
    align_tokens: int = 1
    """Hits end, and replay begins, at multiples of this: the tokens that one paged entry stands for."""
    keep_tokens: int = 0
    """Rows at the end of the whole prompt that run through every layer, the others only through those that keep pages;
    0: all rows run whole. Independent of `kind`."""

    @property
    def replays(self) -> bool:
        """True if pages behind a hit differ from pages of an undivided computation."""
        return self.kind is ReuseKind.REPLAY

    @property
    def legality(self) -> Legality:
        """Which lengths of a match the tree may hand out."""
        return only_nothing if self.kind is ReuseKind.NONE else every_prefix

    def encoder_floor(self, hit_tokens: int) -> int:
        """Return where the computation behind a hit begins: no window reaches below it."""
        return max(0, hit_tokens - self.replay_tokens) if self.replays else hit_tokens

    def decoder_floor(self, prompt_tokens: int) -> int:
        """Return the first prompt token that runs through every layer."""
        return max(0, prompt_tokens - self.keep_tokens) if self.keep_tokens else 0

    def known_tokens(self, decoder_floor: int) -> int:
        """Return the length from whose end the model counts its keep length; 0: the row runs whole."""
        return decoder_floor + self.keep_tokens if decoder_floor else 0

    def gains(self, hit_tokens: int) -> bool:
        """True if a hit of this length saves work: one that would be replayed from position 0 on saves none."""
        return hit_tokens > (self.replay_tokens if self.replays else 0)


PAGES = ReuseRule()
"""A model that keeps nothing but pages and runs every row through every layer."""


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
