"""Page -> set of worker slots in packed arrays: 12 bytes an entry, 16 to 32 bytes a page with the room to grow.

An open-addressing table of 64-bit keys beside the number of an interned set. Pages of one prefix share their holders,
so there are far fewer sets than pages. Keys are hashes already (`core.hashing.event_hash`): a mask is the whole hash
function. Knows no events and no time; one thread.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

UNUSED, EMPTY = 0, 1
"""Sets of an entry that was never used, and of a page that nobody holds any more (it ends no probe)."""
SMALLEST = 1024
SET_BYTES = 150
FULL = 0.75
"""Share of used entries at which the table is built anew."""
GROWTH = 1.4
"""Times its pages: what a table built anew holds before the next time."""
BULK = 64
"""From so many pages on arrays are faster than a loop."""


class PageTable:
    """Counts of pages per slot are kept too: `pages(slot)`."""

    def __init__(self) -> None:
        self._masks: list[int] = [0, 0]
        self._members: list[int] = [0, 0]
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []
        self._counts: dict[int, int] = {}
        self._allocate(SMALLEST)

    def __len__(self) -> int:
        """Distinct pages that somebody holds."""
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of the table, and about those of its sets (each a mask, an entry of a dict and of two lists)."""
        mask_bytes = 28 + max(self._counts, default=0) // 8
        return self._keys.nbytes + self._sets.nbytes + (SET_BYTES + mask_bytes) * len(self._numbers)

    def get(self, page: int) -> int:
        """Return the bit set of slots that hold `page`."""
        return self._masks[self._set_view[self._find(page)]]

    def pages(self, slot: int) -> int:
        """Return how many pages a slot holds."""
        return self._counts.get(slot, 0)

    def add(self, slot: int, pages: Sequence[int]) -> None:
        """The slot holds these pages too."""
        if len(pages) >= BULK:
            self._add_many(slot, np.unique(np.array(pages, dtype=np.int64)))
            return
        bit, added = 1 << slot, 0
        for page in pages:
            at = self._find(page)
            number = self._set_view[at]
            mask = self._masks[number]
            if mask & bit:
                continue
            added += 1
            self._live += not mask
            self._leave(number, 1)
            self._set_view[at] = self._join(mask | bit, 1)
            if number == UNUSED:
                self._key_view[at] = page
                self._used += 1
                if self._used > self._limit:
                    self._rebuild()
        self._counts[slot] = self._counts.get(slot, 0) + added

    def discard(self, slot: int, pages: Iterable[int]) -> None:
        """The slot holds none of these pages any more."""
        if not self._counts.get(slot):
            return
        bit, gone = 1 << slot, 0
        for page in pages:
            at = self._find(page)
            number = self._set_view[at]
            mask = self._masks[number]
            if not mask & bit:
                continue
            gone += 1
            self._leave(number, 1)
            left = mask & ~bit
            self._live -= not left
            self._set_view[at] = self._join(left, 1) if left else EMPTY
        if gone:
            self._counts[slot] -= gone

    def drop(self, slot: int) -> None:
        """Forget everything of a slot: each set loses it, and all entries learn their set's new number at once."""
        if not self._counts.pop(slot, 0):
            return
        bit = 1 << slot
        renamed = np.arange(len(self._masks), dtype=np.int32)
        for mask, number in list(self._numbers.items()):
            if mask & bit:
                members, left = self._members[number], mask & ~bit
                self._leave(number, members)
                renamed[number] = self._join(left, members) if left else EMPTY
                self._live -= 0 if left else members
        self._sets[:] = renamed[self._sets]
        if self._live < len(self._keys) // 8 and len(self._keys) > SMALLEST:
            self._rebuild()

    # Book-keeping

    def _allocate(self, size: int) -> None:
        self._keys: NDArray[np.int64] = np.zeros(size, dtype=np.int64)
        self._sets: NDArray[np.int32] = np.zeros(size, dtype=np.int32)
        # Views: one element costs a third of what it costs through an array.
        self._key_view, self._set_view = self._keys.data, self._sets.data
        self._mask = size - 1
        self._limit = int(size * FULL)
        self._used = self._live = 0

    def _find(self, page: int) -> int:
        """Return the entry of `page`, or the unused one where it belongs."""
        keys, sets, mask = self._key_view, self._set_view, self._mask
        at = page & mask
        while sets[at] and keys[at] != page:
            at = (at + 1) & mask
        return at

    def _join(self, mask: int, members: int) -> int:
        """Return the number of a set, interned, with so many more members."""
        number = self._numbers.get(mask)
        if number is None:
            if not self._free:
                self._free.append(len(self._masks))
                self._masks.append(0)
                self._members.append(0)
            number = self._numbers[mask] = self._free.pop()
            self._masks[number] = mask
        self._members[number] += members
        return number

    def _leave(self, number: int, members: int) -> None:
        """So many entries leave a set; one without entries is forgotten and its number free."""
        if number <= EMPTY:
            return
        self._members[number] -= members
        if not self._members[number]:
            del self._numbers[self._masks[number]]
            self._masks[number] = 0
            self._free.append(number)

    def _rebuild(self, more: int = 0) -> None:
        """Move the pages that somebody holds to a table with room for `more`."""
        held = self._sets > EMPTY
        keys, sets = self._keys[held], self._sets[held]
        size = SMALLEST
        while size * FULL < GROWTH * (len(keys) + more):
            size *= 2
        self._allocate(size)
        self._sets[self._place(keys)] = sets
        self._live = len(keys)

    def _place(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] entries of distinct `keys`; a new one gets an entry, marked EMPTY."""
        at, open_ = keys & self._mask, np.arange(len(keys))
        while len(open_):
            spots, wanted = at[open_], keys[open_]
            new = self._sets[spots] == UNUSED
            # Where several want one entry the last writer has it; the others see a foreign key and go on.
            self._keys[spots[new]] = wanted[new]
            self._sets[spots[new]] = EMPTY
            mine = self._keys[spots] == wanted
            self._used += int(np.count_nonzero(new & mine))
            open_ = open_[~mine]
            at[open_] = (at[open_] + 1) & self._mask
        return at

    def _add_many(self, slot: int, pages: NDArray[np.int64]) -> None:
        """`add` for distinct pages, a set at a time."""
        if self._used + len(pages) > self._limit:
            self._rebuild(len(pages))
        at = self._place(pages)
        before = self._sets[at]
        for number, members in zip(*np.unique_counts(before), strict=True):
            mask, count = self._masks[number], int(members)
            if mask >> slot & 1:
                continue
            self._counts[slot] = self._counts.get(slot, 0) + count
            self._live += 0 if mask else count
            self._leave(int(number), count)
            self._sets[at[before == number]] = self._join(mask | 1 << slot, count)
