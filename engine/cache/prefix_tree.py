"""The prefix tree: which pages hold which prefix, who locks them, and which leave first.

A radix tree over page hashes (L1). It shares the pool with the engine: `publish` moves PRIVATE pages to TREE, and every
page that leaves the tree is returned to the caller, who frees it under the current fence. Scheduler thread only; no
clock (a counter orders accesses), no tensors. Knows nothing of requests, steps or what a tier does.

Locks are per page and counted; a receipt is the right to unlock the first n pages of one path exactly once. Pages
without locks leave from the tails of leaves, least recently used leaf first. Since locks never grow along a path, every
page without a lock can be evicted: `num_evictable` is exact.
"""

from collections.abc import Sequence

import numpy as np

from core.errors import InvariantError
from core.ids import PageHash
from engine.cache.events import KvRecorder, NullRecorder
from engine.cache.flushed import FlushedPages
from engine.cache.hit import Hit, Legality, every_prefix
from engine.cache.leaf_queue import LeafQueue
from engine.cache.node import Node, walk
from engine.cache.page_pool import PagePool
from engine.cache.page_state import Pages
from engine.cache.receipt import HeldRow, Published, Receipt
from engine.cache.tier import NullTier, TierPort
from engine.cache.tree_audit import TreeView, audit_tree
from engine.events import SeqId

_NO_PAGES: Pages = np.zeros(0, np.int32)
_NO_PAGES.setflags(write=False)


class PrefixTree:
    """Radix tree over the TREE pages of one pool. `legality` says which match lengths the model can build on."""

    def __init__(
        self,
        pool: PagePool,
        *,
        recorder: KvRecorder | None = None,
        tier: TierPort | None = None,
        legality: Legality = every_prefix,
    ) -> None:
        self._pool = pool
        self._recorder: KvRecorder = recorder if recorder is not None else NullRecorder()
        self._tier: TierPort = tier if tier is not None else NullTier()
        self._legality = legality
        self._root = Node(None, 0, [], _NO_PAGES)
        self._leaves = LeafQueue()
        self._receipts: dict[Receipt, None] = {}
        self._clock = 0
        self._num_pages = 0
        self._num_locked = 0
        # Bumped whenever pages leave: hits of before are checked again.
        self._version = 0
        # Bumped by flush: receipts of before belong to pages that nobody matches any more.
        self._generation = 0
        self._flushed = FlushedPages()

    @property
    def num_pages(self) -> int:
        """TREE pages held, flushed ones that are still locked included."""
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Exactly how many pages `evict` could return now."""
        return self._num_pages - self._num_locked

    @property
    def num_receipts(self) -> int:
        """Receipts that are not used up."""
        return len(self._receipts)

    def match(self, hashes: Sequence[PageHash]) -> Hit:
        """Return the longest cached prefix of a chain and its legal lengths. Changes nothing but the access order."""
        path, depth = walk(self._root, hashes)
        self._touch(path[-1])
        pages = _joined([node.pages[: depth - node.depth] for node in path[1:]])
        present = np.ones(len(hashes), np.bool_)
        if depth < len(hashes):
            present[depth:] = self._tier.lookup(hashes[depth:])
        return Hit(hashes=hashes, pages=pages, legal=self._legality(present), version=self._version)

    def borders(self, hashes: Sequence[PageHash]) -> tuple[int, ...]:
        """Return the lengths in pages at which another chain can leave this one, ascending; the last is what matches."""
        path, depth = walk(self._root, hashes)
        return (*(node.end for node in path[1:] if node.end < depth and len(node.kids) > 1), depth)

    def lock(self, hit: Hit, num_pages: int) -> Receipt:
        """Lock the first `num_pages` device pages of a hit (0 is legal: an empty receipt).

        Raises InvariantError if the length is not legal, or if some of those pages left the tree since the match.
        """
        if not 0 <= num_pages <= hit.num_device or not bool(hit.legal[num_pages]):
            raise InvariantError(f"{num_pages} pages is not a legal length of a hit of {hit.num_device} pages")
        path, depth = walk(self._root, hit.hashes[:num_pages])
        if hit.version != self._version:
            pages = _joined([node.pages[: depth - node.depth] for node in path[1:]])
            if not np.array_equal(pages, hit.pages[:num_pages]):
                raise InvariantError(
                    f"pages of the hit have left the tree since the match: {depth} of {num_pages} stay"
                )
        for node in path[1:]:
            self._num_locked += node.lock(node.depth, min(node.end, num_pages))
        return self._receipt(path[-1], num_pages, self._generation)

    def unlock(self, receipt: Receipt, fence: int | None = None) -> None:
        """Use up a receipt. `fence`, if given, is the last launched step that may read its pages.

        With it, pages that nobody else locks are known to be idle once that step has retired.
        """
        self._use(receipt)
        is_live = receipt.generation == self._generation
        self._clock += 1
        node: Node | None = receipt.node
        while node is not None:
            if node.depth < receipt.num_pages:
                released = node.unlock(receipt.num_pages)
                self._num_locked -= released
                node.touch = self._clock
                if released:
                    idle = node.pages[node.num_locked : node.num_locked + released]
                    self._pool.note_use(idle, fence)
                if is_live:
                    self._leaves.push(node)
                elif released:
                    self._flushed.collect(node)
            node = node.parent

    def publish(self, owner: SeqId, hashes: Sequence[PageHash], pages: Pages, receipt: Receipt) -> Published:
        """Give the full, final pages of a sequence to the tree and lock them for it; uses up `receipt`.

        `hashes` and `pages` (int32, equal lengths) are the sequence's whole chain so far; the first
        `receipt.num_pages` are in the tree already, the others must be PRIVATE pages of `owner`. Pages that another
        sequence published meanwhile are not donated but come back as duplicates. After a flush nothing is donated: the
        sequence keeps its pages and gets a receipt of the same extent. Raises InvariantError and changes nothing if a
        page is not the owner's own or the receipt is used up.
        """
        start, total = receipt.num_pages, len(hashes)
        if len(pages) != total or start > total:
            raise InvariantError(f"sequence {owner} publishes {len(pages)} pages of a chain of {total} from {start} on")
        self._pool.expect_private(pages[start:], owner)
        self._use(receipt)
        if receipt.generation != self._generation:
            kept = self._receipt(receipt.node, start, receipt.generation)
            return Published(start, pages[start:].copy(), _NO_PAGES, kept)
        runs, depth = self._follow(receipt, hashes)
        canonical: list[Pages] = []
        for run, low, high in runs:
            canonical.append(run.pages[low - run.depth : high - run.depth])
            self._num_locked += run.lock(low, high)
        node = runs[-1][0] if runs else receipt.last_node()
        if depth < total:
            donated = pages[depth:].copy()
            canonical.append(donated)
            node = self._donate(owner, node, depth, hashes, donated)
        self._touch(node)
        kept = self._receipt(node, total, self._generation)
        return Published(start, np.concatenate(canonical or [_NO_PAGES]), pages[start:depth].copy(), kept)

    def evict(self, count: int) -> Pages:
        """Take min(count, num_evictable) pages out, never a locked one; the caller frees them under the fence."""
        taken = self._flushed.take(count)
        need = count - sum(map(len, taken))
        gone: list[PageHash] = []
        while need > 0:
            node = self._leaves.pop()
            if node is None:
                break
            keys, pages = self._trim(node, min(need, len(node.keys) - node.num_locked))
            gone.extend(reversed(keys))
            taken.append(pages)
            need -= len(pages)
        if gone:
            self._version += 1
            self._recorder.removed(gone)
        evicted = np.concatenate(taken or [_NO_PAGES])
        self._num_pages -= len(evicted)
        return evicted

    def flush(self) -> Pages:
        """Forget everything: nothing cached so far is matched again. Returns all unlocked pages; the caller frees them.

        Locked pages follow when their receipts are used up; they count as evictable from then on.
        """
        self._leaves.clear()
        for node in tuple(self._root.subtree()):
            node.kids.clear()
            self._flushed.add(node)
        taken = self._flushed.take(self._num_pages)
        self._root = Node(None, 0, [], _NO_PAGES)
        self._generation += 1
        self._version += 1
        self._recorder.cleared()
        flushed = np.concatenate(taken or [_NO_PAGES])
        self._num_pages -= len(flushed)
        return flushed

    def audit(self, rows: Sequence[HeldRow] | None = None) -> list[str]:
        """Check I1-I5, I7, I8 and I12 of tree and pool; `rows` are all live sequences, if known."""
        view = TreeView(
            root=self._root,
            nodes=tuple(self._root.subtree()),
            flushed=self._flushed.nodes(),
            orphans=self._flushed.orphans(),
            queued=self._leaves.nodes(),
            receipts=tuple(self._receipts),
            generation=self._generation,
            clock=self._clock,
            num_pages=self._num_pages,
            num_locked=self._num_locked,
        )
        return audit_tree(view, self._pool, rows)

    def _follow(self, receipt: Receipt, hashes: Sequence[PageHash]) -> tuple[list[tuple[Node, int, int]], int]:
        """Walk on from the end of a receipt; returns runs (node, low, high) that the tree has already, and their end."""
        node, depth, total = receipt.last_node(), receipt.num_pages, len(hashes)
        runs: list[tuple[Node, int, int]] = []
        while depth < total:
            if depth == node.end:
                kid = node.kids.get(hashes[depth])
                if kid is None:
                    break
                node = kid
            matched = node.match(hashes, depth)
            if not matched:
                break
            runs.append((node, depth, depth + matched))
            depth += matched
        return runs, depth

    def _donate(self, owner: SeqId, node: Node, depth: int, hashes: Sequence[PageHash], donated: Pages) -> Node:
        """Add pages below position `depth` of a node, lock them, and return the node that holds them."""
        self._pool.to_tree(donated, owner)
        if depth < node.end:
            node = self._split(node, depth)
        keys = list(hashes[depth:])
        if node.kids or node is self._root:
            leaf = Node(node, depth, keys, donated)
            node.kids[keys[0]] = leaf
        else:
            leaf = node
            leaf.extend(keys, donated)
        self._num_pages += len(keys)
        self._num_locked += leaf.lock(depth, leaf.end)
        self._recorder.stored(keys, hashes[depth - 1] if depth else None)
        self._tier.store(keys, donated)
        return leaf

    def _split(self, node: Node, at: int) -> Node:
        return node.split(at)

    def _trim(self, node: Node, count: int) -> tuple[list[PageHash], Pages]:
        """Take pages off a leaf's tail; an empty leaf leaves the tree."""
        first = node.keys[0]
        removed = node.trim(count)
        parent = node.parent
        if not node.keys and parent is not None:
            # The node keeps its parent: receipts above may still refer to it.
            del parent.kids[first]
            self._leaves.push(parent)
        self._leaves.push(node)
        return removed

    def _touch(self, node: Node | None) -> None:
        self._clock += 1
        while node is not None:
            node.touch = self._clock
            node = node.parent

    def _receipt(self, node: Node, num_pages: int, generation: int) -> Receipt:
        receipt = Receipt(node, num_pages, generation)
        self._receipts[receipt] = None
        return receipt

    def _use(self, receipt: Receipt) -> None:
        if receipt not in self._receipts:
            raise InvariantError("a receipt was used twice, or is of another tree")
        del self._receipts[receipt]


def _joined(parts: list[Pages]) -> Pages:
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [_NO_PAGES])
