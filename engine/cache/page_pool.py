"""The page pool: every page of a worker is in exactly one state, and only legal moves between states exist.

Pure numpy; used by the scheduler thread only. Knows nothing of what pages hold, of tables, of the tree's shape, or of
who proves that a transfer has stopped. Page 0 is the SINK: padding reads and writes it, nobody ever owns it.

::

    FREE ──allocate──► PRIVATE ──to_tree──► TREE          PRIVATE | TREE ──free──► FENCED ──retire──► FREE
    FREE ──allocate_landing──► LANDING ──commit_landing──► PRIVATE
                               LANDING ──abandon_landing──► FENCED | FREE   (proven: nobody writes it any more)
                               LANDING ──abandon_landing──► UNPROVEN ──prove──► FREE
    FREE ──allocate_loading──► LOADING ──commit_loading──► PRIVATE
                               LOADING ──abandon_loading──► FENCED | FREE

A *fence* is the number of the last launched step that may touch a page. Steps count from 1; fence 0 means that no step
ever touched it. A page whose fence has retired is FREE at once, otherwise it waits as FENCED.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from engine.cache.page_state import NOBODY, PageIndex, Pages, PagesLike, PageState
from engine.cache.pool_audit import PoolView, audit_pool
from engine.events import SeqId

_UNKNOWN = np.iinfo(np.int64).max


class PagePool:
    """Pages 1 .. num_pages-1 of `page_tokens` tokens each. Illegal moves raise InvariantError and change nothing.

    Returned arrays are fresh copies. Arguments may be int32 arrays or sequences of ints without repetition.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        if num_pages < 2 or page_tokens < 1:
            raise InvariantError(f"a pool of {num_pages} pages of {page_tokens} tokens cannot hold anything")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._state = np.zeros(num_pages, np.uint8)
        self._state[0] = PageState.SINK
        self._owner = np.full(num_pages, NOBODY, np.int64)
        self._epoch = np.zeros(num_pages, np.uint32)
        self._last_use = np.full(num_pages, _UNKNOWN, np.int64)
        # Low page ids come out first.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num = [0] * len(PageState)
        self._num[PageState.FREE] = num_pages - 1
        self._num[PageState.SINK] = 1
        self._fenced: list[tuple[int, PageIndex]] = []
        self._retired = 0
        self._scratch = np.zeros(num_pages, np.intp)
        self._ramp = np.arange(num_pages)

    # Facts.

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out now."""
        return self._num[PageState.FREE]

    @property
    def num_fenced(self) -> int:
        """Pages that become free when launched steps retire."""
        return self._num[PageState.FENCED]

    @property
    def num_unproven(self) -> int:
        """Pages that wait for proof that a transfer has stopped."""
        return self._num[PageState.UNPROVEN]

    @property
    def retired_step(self) -> int:
        """The last step given to `retire`; 0 before the first."""
        return self._retired

    def count(self, state: PageState) -> int:
        """Return how many pages are in a state, in O(1)."""
        return self._num[state]

    def num_retiring(self, step: int) -> int:
        """Return how many FENCED pages `retire(step)` would free."""
        return sum(len(pages) for fence, pages in self._fenced if fence <= step)

    def epochs(self, pages: PagesLike) -> npt.NDArray[np.uint32]:
        """Return the allocation epoch of each page (u32, wraps)."""
        return self._epoch[self._index(pages)]

    def states(self, pages: PagesLike | None = None) -> npt.NDArray[np.uint8]:
        """Return `PageState` codes of the given pages, or of all pages."""
        return self._state.copy() if pages is None else self._state[self._index(pages)]

    def owners(self, pages: PagesLike | None = None) -> npt.NDArray[np.int64]:
        """Return the owner (or -1) of the given pages, or of all pages."""
        return self._owner.copy() if pages is None else self._owner[self._index(pages)]

    # Allocation.

    def allocate(self, count: int, owner: SeqId) -> Pages | None:
        """FREE -> PRIVATE of `owner`. Returns int32[count], or None (nothing changed) if fewer pages are free."""
        return self._take(count, owner, PageState.PRIVATE)

    def allocate_each(self, owners: npt.NDArray[np.int64]) -> Pages | None:
        """FREE -> PRIVATE, one page for each of `owners`: the growth of a whole batch. None if fewer pages are free."""
        return self._take(len(owners), owners, PageState.PRIVATE)

    def allocate_landing(self, count: int, owner: SeqId) -> Pages | None:
        """FREE -> LANDING: pages that a transfer of `owner` will write. None if fewer pages are free."""
        return self._take(count, owner, PageState.LANDING)

    def allocate_loading(self, count: int, owner: SeqId) -> Pages | None:
        """FREE -> LOADING: pages that a load ticket of `owner` will write. None if fewer pages are free."""
        return self._take(count, owner, PageState.LOADING)

    # Moves.

    def commit_landing(self, pages: PagesLike, owner: SeqId | None = None) -> None:
        """LANDING -> PRIVATE of the same owner: the hand-over was validated and no read of it is open."""
        self._set(self._expect(pages, PageState.LANDING, owner), PageState.LANDING, PageState.PRIVATE)

    def commit_loading(self, pages: PagesLike, owner: SeqId | None = None) -> None:
        """LOADING -> PRIVATE of the same owner: the load ticket is done and verified."""
        self._set(self._expect(pages, PageState.LOADING, owner), PageState.LOADING, PageState.PRIVATE)

    def abandon_landing(self, pages: PagesLike, open_pages: PagesLike, fence: int = 0) -> None:
        """End a transfer without commit: `open_pages` (a subset) LANDING -> UNPROVEN, the others -> FENCED or FREE."""
        index, still_open = self._expect(pages, PageState.LANDING), self._expect(open_pages, PageState.LANDING)
        mask = np.isin(index, still_open)
        if np.count_nonzero(mask) != len(still_open):
            raise InvariantError("an open page is not among the abandoned pages")
        self._set(still_open, PageState.LANDING, PageState.UNPROVEN)
        self._discard(index[~mask], PageState.LANDING, fence)

    def abandon_loading(self, pages: PagesLike, fence: int) -> None:
        """LOADING -> FENCED or FREE: the load ticket ended and its loader writes no more."""
        self._discard(self._expect(pages, PageState.LOADING), PageState.LOADING, fence)

    def prove(self, pages: PagesLike) -> None:
        """UNPROVEN -> FREE, the only way out of UNPROVEN: the caller holds the proof that nobody writes them."""
        self._discard(self._expect(pages, PageState.UNPROVEN), PageState.UNPROVEN, 0)

    def to_tree(self, pages: PagesLike, owner: SeqId) -> None:
        """PRIVATE of `owner` -> TREE. Only the prefix tree calls this."""
        index = self.expect_private(pages, owner)
        self._set(index, PageState.PRIVATE, PageState.TREE)
        self._owner[index] = NOBODY

    def note_use(self, pages: PagesLike, step: int | None) -> None:
        """Bound the steps that may touch TREE pages nobody holds any more: `step` is the last one, None is unknown.

        Lets `free` skip the fence for pages that have been idle since.
        """
        index = self._index(pages)
        if np.count_nonzero(self._state[index] != PageState.TREE):
            raise InvariantError(f"expected TREE pages, got {self._names(index)}")
        self._last_use[index] = _UNKNOWN if step is None else step

    def free(self, pages: PagesLike, fence: int, owner: SeqId | None = None) -> None:
        """PRIVATE or TREE -> FENCED until `fence` retires, or FREE at once if it has, or if the page idles since before.

        `fence` is the last launched step that may touch any of the pages. With `owner`, PRIVATE pages must be its own.
        """
        index = self._index(pages)
        if not len(index):
            return
        self._check_unique(index)
        states = self._state[index]
        private, tree = index[states == PageState.PRIVATE], index[states == PageState.TREE]
        if len(private) + len(tree) != len(index):
            raise InvariantError(f"expected PRIVATE or TREE pages, got {self._names(index)}")
        if owner is not None and np.count_nonzero(self._owner[private] != owner):
            raise InvariantError(f"expected pages of sequence {owner}, got {self._names(private)}")
        self._discard(private, PageState.PRIVATE, fence)
        self._discard(tree, PageState.TREE, fence)

    def retire(self, step: int) -> int:
        """FENCED -> FREE for every page whose fence is at most `step`. Returns how many; steps never go back."""
        if step < self._retired:
            raise InvariantError(f"step {step} retires after step {self._retired}")
        self._retired = step
        ready = [pages for fence, pages in self._fenced if fence <= step]
        self._fenced = [(fence, pages) for fence, pages in self._fenced if fence > step]
        for pages in ready:
            self._release(pages, PageState.FENCED)
        return sum(len(pages) for pages in ready)

    def expect_private(self, pages: PagesLike, owner: SeqId) -> PageIndex:
        """Return the pages as an index; raises InvariantError unless all are PRIVATE pages of `owner`."""
        return self._expect(pages, PageState.PRIVATE, owner)

    # Machinery.

    def _take(self, count: int, owner: SeqId | npt.NDArray[np.int64], state: PageState) -> Pages | None:
        lowest = owner.min(initial=0) if isinstance(owner, np.ndarray) else owner
        if count < 0 or lowest < 0:
            raise InvariantError(f"cannot allocate {count} pages for sequence {owner}")
        top = self._num[PageState.FREE]
        if count > top:
            return None
        pages = self._free[top - count : top][::-1].copy()
        index = pages.astype(np.intp)
        self._owner[index] = owner
        self._epoch[index] += np.uint32(1)
        self._last_use[index] = _UNKNOWN
        self._set(index, PageState.FREE, state)
        return pages

    def _discard(self, index: PageIndex, source: PageState, fence: int) -> None:
        """Move pages of one state to FREE where no launched step can touch them any more, else to FENCED."""
        if not len(index):
            return
        if fence > self._retired:
            busy = self._last_use[index] > self._retired
            waiting = index[busy]
            if len(waiting):
                self._set(waiting, source, PageState.FENCED)
                self._owner[waiting] = NOBODY
                self._fenced.append((fence, waiting))
                index = index[~busy]
        self._release(index, source)

    def _release(self, index: PageIndex, source: PageState) -> None:
        top = self._num[PageState.FREE]
        self._free[top : top + len(index)] = index
        self._owner[index] = NOBODY
        self._set(index, source, PageState.FREE)

    def _set(self, index: PageIndex, source: PageState, target: PageState) -> None:
        self._state[index] = target
        self._num[source] -= len(index)
        self._num[target] += len(index)

    def _index(self, pages: PagesLike) -> PageIndex:
        index = np.asarray(pages, np.intp)
        # A negative id would wrap to the end of the arrays: as unsigned it is out of range instead.
        if len(index) and int(index.view(np.uintp).max()) >= self.num_pages:
            raise InvariantError(f"no such page among {index.tolist()}")
        return index

    def _expect(self, pages: PagesLike, state: PageState, owner: SeqId | None = None) -> PageIndex:
        index = self._index(pages)
        if not len(index):
            return index
        if np.count_nonzero(self._state[index] != state):
            raise InvariantError(f"expected {state.name} pages, got {self._names(index)}")
        if owner is not None and np.count_nonzero(self._owner[index] != owner):
            raise InvariantError(f"expected pages of sequence {owner}, got {self._names(index)}")
        self._check_unique(index)
        return index

    def _check_unique(self, index: PageIndex) -> None:
        ramp = self._ramp[: len(index)]
        if len(ramp) == len(index):
            self._scratch[index] = ramp
            if not np.count_nonzero(self._scratch[index] != ramp):
                return
        raise InvariantError(f"a page is named twice in {index.tolist()}")

    def _names(self, index: PageIndex) -> list[str]:
        return [f"{page} {PageState(int(self._state[page])).name} of {int(self._owner[page])}" for page in index]

    def audit(
        self, owned: Mapping[SeqId, Iterable[int]] | None = None, tree_pages: Iterable[int] | None = None
    ) -> list[str]:
        """Check the partition (I1) and conservation (I2); returns one sentence per violation.

        `owned` maps every live sequence to all its PRIVATE, LOADING and LANDING pages; `tree_pages` are all pages that
        the tree holds. Where given, they must agree with the states exactly.
        """
        view = PoolView(
            states=self._state,
            owners=self._owner,
            counts=tuple(self._num),
            free=self._free[: max(0, self._num[PageState.FREE])],
            fenced=tuple(self._fenced),
            retired=self._retired,
        )
        return audit_pool(view, owned, tree_pages)
