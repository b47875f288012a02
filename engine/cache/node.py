"""One node of the prefix tree: a run of consecutive pages with their hashes and per-page lock counts.

Positions are absolute: page i of a node lies at position `depth + i` of its chain. Knows nothing of the pool, of
eviction order or of events. `pages` arrays are never written in place, so slices handed out stay true.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from core.errors import InvariantError
from core.ids import PageHash
from engine.cache.page_state import Pages


class Node:
    """A run of pages below `parent`; the root has none and depth 0. Locks never grow along a path (I4)."""

    __slots__ = ("depth", "keys", "kids", "locks", "num_locked", "pages", "parent", "queued", "touch")

    def __init__(self, parent: "Node | None", depth: int, keys: list[PageHash], pages: Pages) -> None:
        self.parent = parent
        self.depth = depth
        self.keys = keys
        self.pages = pages
        self.locks: npt.NDArray[np.int32] = np.zeros(len(keys), np.int32)
        self.num_locked = 0
        """Length of the run of pages with a lock; those after it have none."""
        self.kids: dict[PageHash, Node] = {}
        self.touch = 0
        self.queued = False
        """True while the eviction heap names this node."""

    @property
    def end(self) -> int:
        """Position after the last page."""
        return self.depth + len(self.keys)

    @property
    def is_trimmable(self) -> bool:
        """True if the last page has neither lock nor page below it."""
        return not self.kids and self.num_locked < len(self.keys)

    def subtree(self) -> Iterator["Node"]:
        """Yield this node and all below it, parents before kids."""
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.kids.values())

    def match(self, hashes: Sequence[PageHash], start: int) -> int:
        """Return how many pages from position `start` on equal `hashes` (indexed by position).

        Hashes are chained, so equality at one position means equality at all before it: a binary search suffices.
        """
        keys, depth = self.keys, self.depth
        low = start
        high = min(len(hashes), depth + len(keys))
        if high > low and keys[high - 1 - depth] == hashes[high - 1]:
            return high - start
        while low < high:
            middle = (low + high) // 2
            if keys[middle - depth] == hashes[middle]:
                low = middle + 1
            else:
                high = middle
        return low - start

    def split(self, at: int) -> "Node":
        """Cut before position `at`; the upper part becomes a new node, which is returned; this one stays the lower.

        Whoever refers to this node and climbs by position still finds its pages.
        """
        cut = at - self.depth
        top = Node(self.parent, self.depth, self.keys[:cut], self.pages[:cut].copy())
        top.locks = self.locks[:cut].copy()
        top.num_locked = min(self.num_locked, cut)
        top.touch = self.touch
        top.kids[self.keys[cut]] = self
        if self.parent is not None:
            self.parent.kids[self.keys[0]] = top
        self.parent = top
        self.depth = at
        self.keys = self.keys[cut:]
        self.pages = self.pages[cut:].copy()
        self.locks = self.locks[cut:].copy()
        self.num_locked -= top.num_locked
        return top

    def extend(self, keys: Sequence[PageHash], pages: Pages) -> None:
        """Append unlocked pages to a node without kids."""
        self.keys.extend(keys)
        self.pages = np.concatenate((self.pages, pages))
        self.locks = np.concatenate((self.locks, np.zeros(len(keys), np.int32)))

    def trim(self, count: int) -> tuple[list[PageHash], Pages]:
        """Take the last `count` pages off; returns their hashes and ids. They must be unlocked."""
        keep = len(self.keys) - count
        if keep < self.num_locked:
            raise InvariantError(f"{self.num_locked - keep} locked pages would leave the tree")
        keys, pages = self.keys[keep:], self.pages[keep:]
        self.keys, self.pages, self.locks = self.keys[:keep], self.pages[:keep], self.locks[:keep]
        return keys, pages

    def lock(self, start: int, stop: int) -> int:
        """Add a lock to positions [start, stop) of this node; returns how many pages got their first."""
        low, high = start - self.depth, stop - self.depth
        self.locks[low:high] += 1
        fresh = high - self.num_locked
        if fresh <= 0:
            return 0
        if low > self.num_locked:
            raise InvariantError(f"a lock from position {start} on would leave unlocked pages above it")
        self.num_locked = high
        return fresh

    def unlock(self, stop: int) -> int:
        """Take one lock off every page before position `stop`; returns how many pages lost their last."""
        high = min(stop - self.depth, len(self.keys))
        if high > self.num_locked:
            raise InvariantError(f"page at position {self.depth + self.num_locked} is unlocked more often than locked")
        self.locks[:high] -= 1
        if high < self.num_locked:
            return 0
        before = self.num_locked
        self.num_locked = int(np.count_nonzero(self.locks[:high]))
        return before - self.num_locked


def walk(root: Node, hashes: Sequence[PageHash]) -> tuple[list[Node], int]:
    """Return the nodes on a chain (the root first; the last may match partly) and the matched length in pages."""
    node, depth, total = root, 0, len(hashes)
    path = [node]
    while depth < total:
        kid = node.kids.get(hashes[depth])
        if kid is None:
            break
        path.append(kid)
        depth += kid.match(hashes, depth)
        if depth < kid.end:
            break
        node = kid
    return path, depth
