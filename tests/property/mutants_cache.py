"""Planted faults of pool, tree and event recorder. Each is one mistake that a real cache has made or could make.

`test_cache.py` proves that the machine finds every one of them. The mutated method says what it does wrong.
"""

import numpy as np

from engine.cache.events import EventRecorder
from engine.cache.hit import every_prefix
from engine.cache.leaf_queue import LeafQueue
from engine.cache.node import Node
from engine.cache.page_pool import PagePool
from engine.cache.page_state import PageState
from engine.cache.prefix_tree import PrefixTree
from engine.cache.receipt import Published

# --- pool --------------------------------------------------------------------------------------------------------


class FreesWithoutFence(PagePool):
    def free(self, pages, fence, owner=None):
        super().free(pages, 0, owner)


class RetiresTooEarly(PagePool):
    def retire(self, step):
        self._fenced = [(min(fence, step), pages) for fence, pages in self._fenced]
        return super().retire(step)


class NeverRetires(PagePool):
    def retire(self, step):
        self._retired = step
        return 0


class BumpsNoEpoch(PagePool):
    def _take(self, count, owner, state):
        pages = super()._take(count, owner, state)
        if pages is not None and state is PageState.LANDING:
            self._epoch[pages] -= np.uint32(1)
        return pages


class ProvesTwice(PagePool):
    def prove(self, pages):
        for page in np.asarray(pages).tolist():
            if 0 <= page < self.num_pages and self._state[page] in (PageState.UNPROVEN, PageState.FREE):
                self._discard(np.asarray([page]), PageState(int(self._state[page])), 0)


class ForgetsOpenWriters(PagePool):
    def abandon_landing(self, pages, open_pages, fence=0):
        super().abandon_landing(pages, np.zeros(0, np.int32), fence)


class TreatsEveryWriterAsOpen(PagePool):
    def abandon_landing(self, pages, open_pages, fence=0):
        super().abandon_landing(pages, pages, fence)


class GivesAShortAnswer(PagePool):
    def allocate(self, count, owner):
        return super().allocate(min(count, self.num_free), owner)


class GivesAllToTheFirstOwner(PagePool):
    def allocate_each(self, owners):
        return super().allocate_each(np.full_like(owners, owners[0]) if len(owners) else owners)


class HandsOutTheSink(PagePool):
    def __init__(self, num_pages, page_tokens):
        super().__init__(num_pages, page_tokens)
        self._free[num_pages - 2] = 0


class KeepsTheOwner(PagePool):
    def to_tree(self, pages, owner):
        super().to_tree(pages, owner)
        self._owner[np.asarray(pages, np.intp)] = owner


class DonatesForAnyOwner(PagePool):
    def expect_private(self, pages, owner):
        return self._expect(pages, PageState.PRIVATE)


class MiscountsACommit(PagePool):
    def commit_landing(self, pages, owner=None):
        super().commit_landing(pages, owner)
        self._num[PageState.LANDING] += 1


class AcceptsAPageTwice(PagePool):
    def _check_unique(self, index):
        pass


class FreesAbandonedLoadsAtOnce(PagePool):
    def abandon_loading(self, pages, fence):
        super().abandon_loading(pages, 0)


class TrustsAnOldUse(PagePool):
    """An unlock without a known fence leaves the bound of an earlier one."""

    def note_use(self, pages, step):
        if step is not None:
            super().note_use(pages, step)


# --- tree --------------------------------------------------------------------------------------------------------


class ForgetsDuplicates(PrefixTree):
    def publish(self, owner, hashes, pages, receipt):
        p = super().publish(owner, hashes, pages, receipt)
        return Published(p.start, p.canonical_pages, p.duplicate_pages[:0], p.receipt)


class KeepsItsOwnPages(PrefixTree):
    def publish(self, owner, hashes, pages, receipt):
        p = super().publish(owner, hashes, pages, receipt)
        return Published(p.start, pages[p.start :].copy(), p.duplicate_pages, p.receipt)


class DonatesAfterAFlush(PrefixTree):
    """Pages computed before a flush are matched after it."""

    def publish(self, owner, hashes, pages, receipt):
        if receipt.num_pages == 0 and receipt.generation != self._generation:
            receipt.generation = self._generation
            receipt.node = self._root
        return super().publish(owner, hashes, pages, receipt)


class SplitLosesLocks(PrefixTree):
    def _split(self, node, at):
        top = node.split(at)
        top.locks[:] = 0
        return top


class SplitDropsTheLowerPart(PrefixTree):
    def _split(self, node, at):
        top = node.split(at)
        top.kids.clear()
        return top


class SplitForgetsLockedCount(PrefixTree):
    def _split(self, node, at):
        top = node.split(at)
        top.num_locked = 0
        return top


class EvictsLockedPages(PrefixTree):
    def _trim(self, node, count):
        if node.num_locked:
            self._num_locked -= node.num_locked
            node.num_locked = 0
            node.locks[:] = 0
            count = len(node.keys)
        return super()._trim(node, count)


class EvictsTheMiddle(PrefixTree):
    def _trim(self, node, count):
        parent = node.parent
        if parent is not None and parent is not self._root and not parent.num_locked and len(parent.keys) >= count:
            return parent.trim(count)
        return super()._trim(node, count)


class EvictsTooMuch(PrefixTree):
    def evict(self, count):
        return super().evict(count + 1 if count else 0)


class LosesParentsOfEvictedLeaves(PrefixTree):
    """A node that becomes a leaf is never queued: its pages can not be evicted any more."""

    def _trim(self, node, count):
        first, parent = node.keys[0], node.parent
        removed = node.trim(count)
        if not node.keys:
            del parent.kids[first]
        self._leaves.push(node)
        return removed


class UnlocksTooLittle(PrefixTree):
    def unlock(self, receipt, fence=None):
        if receipt in self._receipts and receipt.num_pages > 1:
            receipt.num_pages -= 1
        super().unlock(receipt, fence)


class ReusesReceipts(PrefixTree):
    def _use(self, receipt):
        self._receipts.pop(receipt, None)


class PublishLocksNothing(PrefixTree):
    """Donated pages are not locked for their donor."""

    def _donate(self, owner, node, depth, hashes, donated):
        leaf = super()._donate(owner, node, depth, hashes, donated)
        leaf.locks[depth - leaf.depth :] -= 1
        leaf.num_locked -= len(donated)
        self._num_locked -= len(donated)
        return leaf


class LocksStaleHits(PrefixTree):
    def lock(self, hit, num_pages):
        object.__setattr__(hit, "version", self._version)
        return super().lock(hit, num_pages)


class CountsEvictableWrongly(PrefixTree):
    @property
    def num_evictable(self):
        return self._num_pages - self._num_locked - sum(map(len, self._flushed.orphans()))


class FlushKeepsMatching(PrefixTree):
    def flush(self):
        root = self._root
        kids = dict(root.kids)
        pages = super().flush()
        self._root.kids = {key: kid for key, kid in kids.items() if kid.keys}
        return pages


class FlushForgetsLockedPages(PrefixTree):
    """Pages that were locked at a flush never come back."""

    def unlock(self, receipt, fence=None):
        super().unlock(receipt, fence)
        self._flushed._orphans.clear()


class OverMatches(PrefixTree):
    """The last page of a node counts as matched if the one before it is."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._root = _GreedyNode(None, 0, [], self._root.pages)

    def match(self, hashes):
        for node in list(self._root.subtree()):
            node.__class__ = _GreedyNode
        return super().match(hashes)


class _GreedyNode(Node):
    __slots__ = ()

    def match(self, hashes, start):
        matched = super().match(hashes, start)
        room = min(len(hashes), self.end) - start
        return min(matched + 1, room) if matched else 0


class ServesTooMuch(PrefixTree):
    """Every length is called legal, cached or not."""

    def __init__(self, pool, **kwargs):
        super().__init__(pool, legality=lambda present: every_prefix(np.ones_like(present)), **kwargs)


class QueuesTwice(PrefixTree):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._leaves = _ForgetfulQueue()


class _ForgetfulQueue(LeafQueue):
    def push(self, node):
        node.queued = False
        super().push(node)


# --- recorder ----------------------------------------------------------------------------------------------------


class ForgetsRemovals(EventRecorder):
    def removed(self, hashes):
        super().removed(hashes[:-1])


class RemovesParentsFirst(EventRecorder):
    def removed(self, hashes):
        super().removed(list(reversed(hashes)))


class ForgetsParents(EventRecorder):
    def stored(self, hashes, parent):
        super().stored(hashes, None)


class SkipsNumbers(EventRecorder):
    def drain(self):
        self._sequence += 1
        return super().drain()


class SnapshotsTheFuture(EventRecorder):
    """A snapshot holds events that its sequence number does not cover."""

    def snapshot(self, incarnation):
        sequence = self._sequence
        self.drain()
        self._sequence = sequence
        return super().snapshot(incarnation)


class ForgetsToClear(EventRecorder):
    def cleared(self):
        pass


MUTANTS = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type)
    and issubclass(kind, PagePool | PrefixTree | EventRecorder)
    and kind.__module__ == __name__
    and not kind.__name__.startswith("_")
]
