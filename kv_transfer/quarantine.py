"""Memory of failed reads that some operation may still write: held until every such operation is proven over. Pure.

There is no other way out: no timeout, no budget and no peer's word releases anything. One thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.api import Op


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of one group of operations; `release` gives it back."""

    ops: tuple[Op, ...]
    num_pages: int
    since: float
    release: Callable[[], None]


class Quarantine:
    """Of one transport."""

    def __init__(self) -> None:
        self._held: list[Held] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_pages(self) -> int:
        """Pages held."""
        return sum(held.num_pages for held in self._held)

    def oldest_s(self, now: float) -> float:
        """Age of the longest-held entry in seconds; 0 if there is none."""
        return max((now - held.since for held in self._held), default=0.0)

    def hold(self, ops: Sequence[Op], num_pages: int, release: Callable[[], None], now: float) -> None:
        """Keep memory until all of `ops` are proven over."""
        self._held.append(Held(tuple(ops), num_pages, now, release))

    def sweep(self, quiesced: Callable[[Op], bool]) -> int:
        """Release what is proven; return how many entries that were."""
        proven = [held for held in self._held if all(quiesced(op) for op in held.ops)]
        self._held = [held for held in self._held if held not in proven]
        for held in proven:
            held.release()
        return len(proven)
