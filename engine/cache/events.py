"""Records changes of the prefix tree as KV events, in numbered batches, with a snapshot as of the last batch.

The tree calls `stored`, `removed` and `cleared`; the engine calls `drain` once per pass. Page hashes become event
hashes here and nowhere else, so the chain never leaves the engine. Scheduler thread only.
"""

from collections.abc import Sequence
from typing import Protocol

from core.hashing import event_hash
from core.ids import Incarnation, PageHash
from core.worker import KvEvent, KvEventBatch, KvSnapshot


class KvRecorder(Protocol):
    """Where a tree tells its changes. Parents are stored before children and removed after them."""

    def stored(self, hashes: Sequence[PageHash], parent: PageHash | None) -> None:
        """Pages were added below `parent` (None: at the root), each the parent of the next."""
        ...

    def removed(self, hashes: Sequence[PageHash]) -> None:
        """Pages left the tree, children first."""
        ...

    def cleared(self) -> None:
        """Nothing is cached any more."""
        ...


class EventRecorder:
    """Collects events until `drain`, which numbers batches from 1 without gaps."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, list[PageHash], PageHash | None]] = []
        self._sequence = 0
        self._known: dict[int, None] = {}

    def stored(self, hashes: Sequence[PageHash], parent: PageHash | None) -> None:
        self._pending.append(("stored", list(hashes), parent))

    def removed(self, hashes: Sequence[PageHash]) -> None:
        # One eviction trims many leaves: they travel as one event.
        if self._pending and self._pending[-1][0] == "removed":
            self._pending[-1][1].extend(hashes)
        else:
            self._pending.append(("removed", list(hashes), None))

    def cleared(self) -> None:
        self._pending.append(("cleared", [], None))

    @property
    def sequence(self) -> int:
        """Number of the last drained batch; 0 before the first."""
        return self._sequence

    def drain(self) -> KvEventBatch | None:
        """Return everything recorded since the last call as one batch, or None if nothing was."""
        if not self._pending:
            return None
        events: list[KvEvent] = []
        for kind, hashes, parent in self._pending:
            names = tuple(map(event_hash, hashes))
            events.append(KvEvent(kind=kind, hashes=names, parent=event_hash(parent) if parent is not None else 0))
            if kind == "stored":
                self._known.update(dict.fromkeys(names))
            elif kind == "removed":
                for name in names:
                    self._known.pop(name, None)
            else:
                self._known.clear()
        self._pending.clear()
        self._sequence += 1
        return KvEventBatch(sequence=self._sequence, events=tuple(events))

    def snapshot(self, incarnation: Incarnation) -> KvSnapshot:
        """Return what a reader knows who applied every batch up to the last drained one, parents before children."""
        return KvSnapshot(incarnation=incarnation, sequence=self._sequence, hashes=tuple(self._known))


class NullRecorder:
    """Records nothing: for an engine whose tree nobody watches."""

    def stored(self, hashes: Sequence[PageHash], parent: PageHash | None) -> None:
        """Ignore."""

    def removed(self, hashes: Sequence[PageHash]) -> None:
        """Ignore."""

    def cleared(self) -> None:
        """Ignore."""
