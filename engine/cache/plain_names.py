"""Tells events of pages that were computed behind replay under the names that exact pages of the same tokens have.

Whoever routes requests knows tokens, not histories: it must find all pages that a request may build on. Several pages
of one tree can have one name; it is stored with the first of them and removed with the last. Scheduler thread only.
"""

from collections import Counter
from collections.abc import Sequence

from core.ids import PageHash
from engine.cache.events import KvRecorder


class PlainNames:
    """A `KvRecorder` before another one."""

    def __init__(self, recorder: KvRecorder) -> None:
        self._recorder = recorder
        self._coming: dict[PageHash, PageHash] = {}
        self._plain: dict[PageHash, PageHash] = {}
        self._count: Counter[PageHash] = Counter()

    def introduce(self, hashes: Sequence[PageHash], plain: Sequence[PageHash]) -> None:
        """Say the names of pages (parallel) that may be stored next; forgets what was introduced before."""
        self._coming = dict(zip(hashes, plain, strict=True))

    def stored(self, hashes: Sequence[PageHash], parent: PageHash | None) -> None:
        fresh: list[PageHash] = []
        above = self._plain.get(parent, parent) if parent is not None else None
        for page in hashes:
            name = self._coming.get(page, page)
            if name != page:
                self._plain[page] = name
            self._count[name] += 1
            if self._count[name] == 1:
                fresh.append(name)
            elif not fresh:
                # Whatever has a name has its parents' names too, so the fresh ones are the last.
                above = name
        if fresh:
            self._recorder.stored(fresh, above)

    def removed(self, hashes: Sequence[PageHash]) -> None:
        gone: list[PageHash] = []
        for page in hashes:
            name = self._plain.pop(page, page)
            self._count[name] -= 1
            if not self._count[name]:
                del self._count[name]
                gone.append(name)
        if gone:
            self._recorder.removed(gone)

    def cleared(self) -> None:
        self._plain.clear()
        self._count.clear()
        self._recorder.cleared()
