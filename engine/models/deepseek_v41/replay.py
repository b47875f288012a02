"""Which rows of a prompt run through which layers, and how far back their windows reach.

The keep length counts back from the end of all tokens that were known when the request was admitted, never from the end
of a chunk: so results do not depend on where chunks end. Pure numbers; knows no tensors.
"""

from dataclasses import dataclass

OFF, MASK, COMPACT = "off", "mask", "compact"
"""Modes: every row runs whole; every row runs, with the windows of compact; decoder layers run kept rows only."""


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """What replay prescribes for one request."""

    mode: str = OFF
    keep: int = 0
    """K: the last K known tokens run through the decoder."""
    known_tokens: int = 0
    """N: tokens known at admission; 0 means that the request runs whole."""
    floor: int = 0
    """Window rows below this position do not exist, in no layer."""
    write_from: int = 0
    """Tokens below this position write no entries: theirs exist already."""

    @property
    def decoder_floor(self) -> int:
        """First position with window rows in decoder layers because of the keep length alone."""
        return 0 if self.mode == OFF or not self.known_tokens else max(0, self.known_tokens - self.keep)

    def first_window_row(self, *, is_decoder: bool) -> int:
        """Return the first position whose window rows exist."""
        return max(self.floor, self.decoder_floor if is_decoder else 0)

    def first_kept(self, start: int, stop: int) -> int:
        """Return the first row of a chunk [start, stop) that goes on through the decoder: at least the last one.

        A chunk that ends before the kept ones sends its last row alone: a placeholder with an empty window, which
        writes no window row and whose result nobody uses.
        """
        if self.mode != COMPACT:
            return start
        return start + min(max(0, self.decoder_floor - start), stop - start - 1)
