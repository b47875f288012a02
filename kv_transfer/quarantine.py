"""Memory of failed reads that some operation may still write: held until every such operation is proven over. Pure.

There is no other way out: no timeout, no budget and no peer's word releases anything. One thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.api import Op


class MemoryOwner(Protocol):
    """Who gets memory back: the host of the pages, or the staging ring for its slots."""

    def prove(self, pages: Sequence[int]) -> None:
        """No operation can write these any more."""
        ...


class Prover(Protocol):
    """A transport, as the quarantine sees it."""

    def quiesced(self, op: Op) -> bool:
        """True iff no byte of the operation can land any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Memory of one group of operations."""

    ops: tuple[Op, ...]
    pages: tuple[int, ...]
    owner: MemoryOwner
    since: float
    on_proven: Callable[[], None]


class Quarantine:
    """Of one transport."""

    def __init__(self) -> None:
        self._held: list[Held] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_pages(self) -> int:
        """Pages (and staging slots) held."""
        return sum(len(held.pages) for held in self._held)

    def num_pages_since(self, moment: float) -> int:
        """Pages held from before that moment on."""
        return sum(len(held.pages) for held in self._held if held.since <= moment)

    def oldest_s(self, now: float) -> float:
        """Age of the longest-held entry in seconds; 0 if there is none."""
        return max((now - held.since for held in self._held), default=0.0)

    def hold(self, held: Held) -> None:
        """Keep memory until all of its operations are proven over."""
        self._held.append(held)

    def sweep(self, transport: Prover) -> int:
        """Give back what is proven; return how many entries that were."""
        waiting, self._held = self._held, []
        for held in waiting:
            if all(transport.quiesced(op) for op in held.ops):
                held.owner.prove(held.pages)
                held.on_proven()
            else:
                self._held.append(held)
        return len(waiting) - len(self._held)
