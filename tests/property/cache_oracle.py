"""The naive oracle beside pool and tree: dictionaries per page and per page hash, and the moves that keep both in step.

It knows nothing of nodes, stacks or heaps. `CacheDriver` adds what an engine does with them.
"""

import contextlib
import hashlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from core.errors import InvariantError
from core.ids import PageHash
from engine.cache.page_state import PageState
from engine.cache.receipt import HeldRow

FREE, PRIVATE, LOADING, LANDING = PageState.FREE, PageState.PRIVATE, PageState.LOADING, PageState.LANDING
UNPROVEN, TREE, FENCED, SINK = PageState.UNPROVEN, PageState.TREE, PageState.FENCED, PageState.SINK


def chain(items, previous=b"root"):
    hashes = []
    for item in items:
        previous = hashlib.sha256(previous + bytes([item])).digest()
        hashes.append(PageHash(previous))
    return tuple(hashes)


def int32(pages):
    return np.asarray(pages, np.int32)


@contextlib.contextmanager
def refused():
    """The block must raise InvariantError. (`pytest.raises` would not end in an AssertionError that mutants need.)"""
    try:
        yield
    except InvariantError:
        return
    raise AssertionError("an illegal call was accepted")


@dataclass
class Sequence:
    """What the oracle knows of one live sequence."""

    id: int
    hashes: tuple
    pages: list
    receipt: object
    locked: int
    generation: int
    computed: int
    arriving: str = ""
    open_pages: set = field(default_factory=set)


class CacheOracle:
    """State of both worlds, and what must be equal in them."""

    def __init__(self, pool_type, tree_type, recorder_type, num_pages=32):
        self.num_pages = num_pages
        self.recorder = recorder_type()
        self.pool = pool_type(num_pages, 4)
        self.tree = tree_type(self.pool, recorder=self.recorder)
        self.state = [SINK] + [FREE] * (self.num_pages - 1)
        self.owner = [-1] * self.num_pages
        self.epoch = [0] * self.num_pages
        self.locks = Counter()
        self.last_use = {}
        self.fences = {}
        self.cached = {}
        self.parents = {}
        self.generation = 0
        self.sequences = []
        self.next_id = 1
        self.launched = 0
        self.retired = 0
        self.using = {}
        self.writers = set()
        self.reader = {}
        self.reader_sequence = 0

    # The oracle's moves.

    def touched_by_steps(self):
        return set().union(*self.using.values()) if self.using else set()

    def choose(self, index, arriving):
        found = [sequence for sequence in self.sequences if sequence.arriving == arriving]
        return found[index % len(found)] if found else None

    def move(self, pages, source, target, owner=-1):
        for page in pages:
            assert self.state[page] in source, f"the oracle holds page {page} as {self.state[page].name}"
            self.state[page] = target
            self.owner[page] = owner

    def cached_length(self, hashes):
        length = 0
        while length < len(hashes) and hashes[length] in self.cached:
            length += 1
        return length

    def evictable(self):
        return [page for page in range(self.num_pages) if self.state[page] is TREE and not self.locks[page]]

    def take(self, count, owner, target):
        allocate = {
            PRIVATE: self.pool.allocate,
            LANDING: self.pool.allocate_landing,
            LOADING: self.pool.allocate_loading,
        }[target]
        return self.taken(allocate(count, owner), [owner] * count, target)

    def take_each(self, owners):
        return self.taken(self.pool.allocate_each(np.asarray(owners, np.int64)), owners, PRIVATE)

    def taken(self, pages, owners, target):
        if len(owners) > self.state.count(FREE):
            assert pages is None, "the pool handed out pages that it does not have"
            return None
        assert pages is not None and pages.dtype == np.int32 and len(pages) == len(owners) == len(set(pages.tolist()))
        pages = pages.tolist()
        assert not set(pages) & self.touched_by_steps(), "a page was handed out that a launched step still touches"
        assert not set(pages) & self.writers, "a page was handed out that a transfer may still write"
        for page, owner in zip(pages, owners, strict=True):
            self.move([page], (FREE,), target, owner)
            self.epoch[page] += 1
            self.last_use[page] = None
        return pages

    def discard(self, pages, fence):
        """What `free` means: behind the fence, unless the page has idled since an earlier step that retired."""
        for page in pages:
            bound = self.last_use.get(page)
            waits = fence > self.retired and (self.state[page] is not TREE or bound is None or bound > self.retired)
            self.move([page], (PRIVATE, TREE, LOADING, LANDING), FENCED if waits else FREE)
            if waits:
                self.fences[page] = fence

    def free(self, pages, owner=None):
        if len(pages):
            self.pool.free(int32(pages), self.launched, owner)
            self.discard(pages, self.launched)

    def unlock(self, sequence, fence):
        self.tree.unlock(sequence.receipt, fence)
        for page in sequence.pages[: sequence.locked]:
            self.locks[page] -= 1
            if not self.locks[page]:
                self.last_use[page] = fence
        with refused():
            self.tree.unlock(sequence.receipt)

    def begin(self, items, keep, target):
        """Match, lock and allocate; returns None if there is no room."""
        hashes = chain(items)
        self.parents.update(zip(hashes, (None, *hashes[:-1]), strict=True))
        hit = self.tree.match(hashes)
        length = self.cached_length(hashes)
        assert hit.pages.tolist() == [self.cached[h] for h in hashes[:length]]
        assert hit.legal.tolist() == [n <= length for n in range(len(hashes) + 1)]
        assert hit.longest_on_device(len(hashes)) == length
        locked = min(keep, length)
        receipt = self.tree.lock(hit, locked)
        pages = hit.pages[:locked].tolist()
        self.locks.update(pages)
        sequence = Sequence(self.next_id, hashes, pages, receipt, locked, self.generation, locked)
        self.next_id += 1
        fresh = self.take(len(hashes) - locked, sequence.id, target)
        if fresh is None:
            self.unlock(sequence, self.launched)
            return None
        sequence.pages = pages + fresh
        self.sequences.append(sequence)
        return sequence

    # What always holds.

    def check(self):
        self.pool_equals_the_oracle()
        self.tree_equals_the_oracle()
        self.audits_are_silent()

    def pool_equals_the_oracle(self):
        names = [PageState(int(code)) for code in self.pool.states()]
        assert names == self.state
        assert self.pool.owners().tolist() == self.owner
        assert self.pool.epochs(range(self.num_pages)).tolist() == self.epoch
        for state in PageState:
            assert self.pool.count(state) == self.state.count(state)

    def tree_equals_the_oracle(self):
        held = [
            (key, page) for n in self.tree._root.subtree() for key, page in zip(n.keys, n.pages.tolist(), strict=True)
        ]
        assert len(held) == len(self.cached)
        assert dict(held) == self.cached
        assert self.tree.num_evictable == len(self.evictable())
        assert self.tree.num_pages == self.state.count(TREE)
        assert self.tree.num_receipts == len(self.sequences)

    def audits_are_silent(self):
        rows = [HeldRow(s.id, int32(s.pages), s.receipt) for s in self.sequences]
        assert self.tree.audit(rows) == []
