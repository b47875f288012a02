import hashlib

import numpy as np
import pytest

from core.errors import InvariantError
from core.hashing import event_hash
from core.ids import PageHash
from engine.cache.events import EventRecorder
from engine.cache.hit import only_nothing
from engine.cache.page_pool import PagePool
from engine.cache.page_state import PageState
from engine.cache.prefix_tree import PrefixTree
from engine.cache.receipt import HeldRow
from engine.cache.tier import NullTier
from engine.events import SeqId


def chain(text):
    previous, hashes = b"", []
    for letter in text:
        previous = hashlib.sha256(previous + letter.encode()).digest()
        hashes.append(PageHash(previous))
    return tuple(hashes)


class Engine:
    """A pool and a tree, and sequences named by their chains."""

    def __init__(self, num_pages=40, **options):
        self.pool = PagePool(num_pages, 4)
        self.tree = PrefixTree(self.pool, **options)
        self.last = 0

    def begin(self, text, keep=99):
        """Return (owner, hashes, pages, receipt) of a sequence that holds the cached part and private pages."""
        self.last += 1
        hashes = chain(text)
        hit = self.tree.match(hashes)
        held = hit.longest_on_device(keep)
        receipt = self.tree.lock(hit, held)
        fresh = self.pool.allocate(len(hashes) - held, SeqId(self.last))
        return SeqId(self.last), hashes, np.concatenate((hit.pages[:held], fresh)), receipt

    def publish(self, text, keep=99):
        """Begin and publish; returns (owner, table, receipt)."""
        owner, hashes, pages, receipt = self.begin(text, keep)
        published = self.tree.publish(owner, hashes, pages, receipt)
        pages[published.start :] = published.canonical_pages
        self.pool.free(published.duplicate_pages, 0, owner)
        return HeldRow(owner, pages, published.receipt)

    def store(self, text):
        """Publish and let go; returns the pages."""
        row = self.publish(text)
        self.tree.unlock(row.receipt, 0)
        return row.pages.tolist()

    def cached(self, text):
        """Match; returns the pages of the longest cached prefix."""
        return self.tree.match(chain(text)).pages.tolist()


@pytest.fixture
def engine():
    return Engine()


def test_an_empty_tree_matches_nothing(engine):
    hit = engine.tree.match(chain("abc"))
    assert hit.num_device == 0
    assert hit.legal.tolist() == [True, False, False, False]


def test_a_published_chain_is_matched_up_to_where_it_differs(engine):
    pages = engine.store("abcd")
    assert engine.cached("abcd") == pages
    assert engine.cached("abcde") == pages
    assert engine.cached("abxy") == pages[:2]
    assert engine.cached("xbcd") == []
    assert engine.tree.match(chain("abxy")).legal.tolist() == [True, True, True, False, False]


def test_a_branch_shares_the_pages_above_it(engine):
    first = engine.store("abcd")
    second = engine.store("abxy")
    assert second[:2] == first[:2]
    assert engine.cached("abcd") == first
    assert engine.cached("abxy") == second
    assert engine.tree.num_pages == 6


def test_publishing_chunk_by_chunk_gives_one_chain(engine):
    owner, hashes, pages, receipt = engine.begin("abcdef")
    for end in (2, 3, 6):
        receipt = engine.tree.publish(owner, hashes[:end], pages[:end], receipt).receipt
        assert engine.cached("abcdef") == pages[:end].tolist()
    assert engine.tree.audit([HeldRow(owner, pages, receipt)]) == []


def test_pages_that_another_sequence_published_meanwhile_come_back_as_duplicates(engine):
    slow_owner, hashes, slow_pages, receipt = engine.begin("abcd")
    fast = engine.publish("abc")
    published = engine.tree.publish(slow_owner, hashes, slow_pages, receipt)
    assert published.duplicate_pages.tolist() == slow_pages[:3].tolist()
    assert published.canonical_pages.tolist() == [*fast.pages.tolist(), slow_pages[3]]
    engine.pool.free(published.duplicate_pages, 0)
    table = published.canonical_pages
    assert engine.tree.audit([fast, HeldRow(slow_owner, table, published.receipt)]) == []


def test_the_table_given_to_publish_may_be_reused(engine):
    owner, hashes, pages, receipt = engine.begin("abc")
    engine.tree.publish(owner, hashes, pages, receipt)
    expected = pages.tolist()
    pages[:] = 0
    assert engine.cached("abc") == expected


def test_publishing_nothing_new_only_renews_the_receipt(engine):
    row = engine.publish("ab")
    again = engine.tree.publish(row.owner, chain("ab"), row.pages, row.receipt)
    assert len(again.canonical_pages) == len(again.duplicate_pages) == 0
    assert engine.tree.audit([HeldRow(row.owner, row.pages, again.receipt)]) == []


def test_only_private_pages_of_the_owner_can_be_published(engine):
    owner, hashes, pages, receipt = engine.begin("abc")
    stranger = engine.pool.allocate(1, SeqId(99))
    with pytest.raises(InvariantError):
        engine.tree.publish(SeqId(99), hashes, pages, receipt)
    with pytest.raises(InvariantError):
        engine.tree.publish(owner, hashes, np.concatenate((pages[:2], stranger)), receipt)
    assert engine.cached("abc") == []
    engine.tree.publish(owner, hashes, pages, receipt)


def test_tree_pages_beyond_the_receipt_can_not_be_donated_again(engine):
    """A stale donor: a sequence that reads tree pages without a lock would give them to the tree a second time."""
    cached = engine.store("ab")
    owner, hashes, _, receipt = engine.begin("abc", keep=0)
    with pytest.raises(InvariantError):
        engine.tree.publish(owner, hashes[:2], np.asarray(cached, np.int32), receipt)


def test_a_receipt_is_used_exactly_once(engine):
    row = engine.publish("abc")
    engine.tree.unlock(row.receipt)
    with pytest.raises(InvariantError):
        engine.tree.unlock(row.receipt)
    with pytest.raises(InvariantError):
        engine.tree.publish(row.owner, chain("abc"), row.pages, row.receipt)


def test_a_receipt_of_another_tree_is_refused(engine):
    with pytest.raises(InvariantError):
        engine.tree.unlock(Engine().publish("abc").receipt)


def test_only_legal_lengths_can_be_locked():
    engine = Engine(legality=only_nothing)
    engine.store("abc")
    hit = engine.tree.match(chain("abc"))
    assert hit.num_device == 3
    assert hit.longest_on_device(3) == 0
    with pytest.raises(InvariantError):
        engine.tree.lock(hit, 2)
    assert engine.tree.lock(hit, 0).num_pages == 0


def test_a_length_beyond_the_device_pages_can_not_be_locked(engine):
    engine.store("ab")
    hit = engine.tree.match(chain("abc"))
    with pytest.raises(InvariantError):
        engine.tree.lock(hit, 3)


def test_locked_pages_are_never_evicted_and_num_evictable_is_exact(engine):
    engine.store("abcdef")
    hit = engine.tree.match(chain("abcdef"))
    receipt = engine.tree.lock(hit, 2)
    assert engine.tree.num_evictable == 4
    assert sorted(engine.tree.evict(99).tolist()) == sorted(hit.pages[2:].tolist())
    assert engine.tree.num_evictable == 0
    assert len(engine.tree.evict(1)) == 0
    engine.tree.unlock(receipt)
    assert engine.tree.num_evictable == 2


def test_a_receipt_outlives_splits_above_and_evictions_below_it(engine):
    engine.store("abcdef")
    hit = engine.tree.match(chain("abcdef"))
    receipt = engine.tree.lock(hit, 2)
    engine.store("abcxyz")
    engine.store("axyz")
    engine.pool.free(engine.tree.evict(99), 0)
    assert engine.tree.num_pages == 2
    assert engine.cached("abcdef") == hit.pages[:2].tolist()
    engine.tree.unlock(receipt, 0)
    engine.pool.free(engine.tree.evict(99), 0)
    assert engine.pool.audit(owned={}, tree_pages=[]) == []


def test_eviction_trims_the_least_recently_used_leaf_from_its_tail(engine):
    old, new = engine.store("abc"), engine.store("xyz")
    assert engine.tree.evict(1).tolist() == [old[2]]
    engine.cached("ab")
    assert engine.tree.evict(2).tolist() == new[1:]


def test_a_shared_prefix_leaves_after_all_its_branches(engine):
    engine.store("abcx")
    engine.store("abcy")
    order = [engine.tree.evict(1).tolist()[0] for _ in range(5)]
    engine.pool.free(order, 0)
    assert engine.cached("abc") == []
    assert order[2:] == sorted(order[2:], reverse=True)


def test_a_finished_sequence_counts_as_an_access(engine):
    long_running = engine.publish("abc")
    engine.store("xyz")
    engine.tree.unlock(long_running.receipt)
    evicted = engine.tree.evict(3)
    assert not set(evicted.tolist()) & set(long_running.pages.tolist())


def test_a_hit_is_refused_once_its_pages_have_left(engine):
    engine.store("abcd")
    hit = engine.tree.match(chain("abcd"))
    engine.pool.free(engine.tree.evict(1), 0)
    with pytest.raises(InvariantError):
        engine.tree.lock(hit, 4)
    assert engine.tree.lock(hit, 3).num_pages == 3


def test_a_hit_is_refused_if_other_pages_hold_the_same_content_now(engine):
    engine.store("abcd")
    hit = engine.tree.match(chain("abcd"))
    engine.pool.free(engine.tree.evict(4), 0)
    engine.pool.allocate(1, SeqId(77))
    engine.store("abcd")
    with pytest.raises(InvariantError):
        engine.tree.lock(hit, 4)


def test_pages_unlocked_with_a_retired_fence_are_free_at_once_when_evicted(engine):
    row = engine.publish("abcd")
    engine.tree.unlock(row.receipt, fence=3)
    engine.pool.retire(3)
    engine.pool.free(engine.tree.evict(4), fence=5)
    assert engine.pool.num_fenced == 0


def test_pages_unlocked_without_a_fence_wait_for_the_one_given_at_the_free(engine):
    row = engine.publish("abcd")
    engine.tree.unlock(row.receipt)
    engine.pool.retire(3)
    engine.pool.free(engine.tree.evict(4), fence=5)
    assert engine.pool.num_fenced == 4


def test_a_flush_forgets_everything_and_returns_what_is_unlocked(engine):
    engine.store("abx")
    row = engine.publish("aby")
    flushed = engine.tree.flush()
    assert len(flushed) == 1
    engine.pool.free(flushed, 0)
    assert engine.cached("aby") == []
    assert engine.tree.num_evictable == 0
    assert engine.tree.audit([row]) == []


def test_locked_pages_of_a_flushed_tree_leave_after_their_last_lock(engine):
    first = engine.publish("abc")
    second = engine.publish("ab")
    engine.tree.flush()
    engine.tree.unlock(first.receipt, 0)
    assert engine.tree.num_evictable == 1
    engine.tree.unlock(second.receipt, 0)
    engine.store("abc")
    assert engine.tree.num_evictable == 6
    assert sorted(engine.tree.evict(3).tolist()) == sorted(first.pages.tolist())
    assert len(engine.cached("abc")) == 3


def test_pages_computed_before_a_flush_are_not_published_after_it(engine):
    owner, hashes, pages, receipt = engine.begin("abc")
    engine.tree.flush()
    published = engine.tree.publish(owner, hashes, pages, receipt)
    assert published.canonical_pages.tolist() == pages.tolist()
    assert len(published.duplicate_pages) == 0
    assert published.receipt.num_pages == 0
    assert engine.cached("abc") == []
    assert engine.tree.audit([HeldRow(owner, pages, published.receipt)]) == []


def test_events_name_parents_before_children_and_remove_children_first():
    recorder = EventRecorder()
    engine = Engine(recorder=recorder)
    engine.store("abc")
    engine.store("abx")
    engine.tree.evict(4)
    a, b, c, x = (event_hash(h) for h in (*chain("abc"), chain("abx")[2]))
    assert [(e.kind, e.hashes, e.parent) for e in recorder.drain().events] == [
        ("stored", (a, b, c), 0),
        ("stored", (x,), b),
        ("removed", (c, x, b, a), 0),
    ]


def test_a_flush_is_told_as_cleared():
    recorder = EventRecorder()
    engine = Engine(recorder=recorder)
    engine.tree.flush()
    assert [e.kind for e in recorder.drain().events] == ["cleared"]


class HoleyTier(NullTier):
    """Has every second page of what is asked, and remembers what it was offered."""

    def __init__(self):
        self.offered = []

    def lookup(self, hashes):
        return np.arange(len(hashes)) % 2 == 0

    def store(self, hashes, pages):
        self.offered.append((tuple(hashes), pages.tolist()))


def test_a_lower_tier_extends_the_legal_lengths_up_to_its_first_hole():
    engine = Engine(tier=HoleyTier())
    engine.store("ab")
    hit = engine.tree.match(chain("abcdef"))
    assert hit.legal.tolist() == [True, True, True, True, False, False, False]
    assert hit.longest(6) == 3
    assert hit.longest_on_device(6) == 2


def test_donated_pages_are_offered_to_the_lower_tier():
    tier = HoleyTier()
    engine = Engine(tier=tier)
    pages = engine.store("ab")
    more = engine.store("abc")
    assert tier.offered == [(chain("ab"), pages), (chain("abc")[2:], more[2:])]


def test_the_null_tier_has_nothing_and_refuses_loads():
    tier = NullTier()
    assert tier.lookup(chain("ab")).tolist() == [False, False]
    tier.store(chain("ab"), np.asarray([1, 2], np.int32))
    with pytest.raises(InvariantError):
        tier.load(chain("a"), np.asarray([1], np.int32))


def test_tree_pages_are_in_the_tree_state_until_they_are_freed(engine):
    engine.store("abc")
    evicted = engine.tree.evict(3)
    assert engine.pool.states(evicted).tolist() == [PageState.TREE] * 3
    engine.pool.free(evicted, 0)
    assert engine.pool.num_free == 39


def test_borders_are_where_another_chain_can_leave():
    engine = Engine()
    for text in ("abcdef", "abxy", "abcdzz"):
        engine.store(text)
    assert engine.tree.borders(chain("abcdef")) == (2, 4, 6)
    assert engine.tree.borders(chain("abcq")) == (2, 3)
    assert engine.tree.borders(chain("q")) == (0,)


def test_an_end_that_nothing_else_hangs_from_is_no_border():
    engine = Engine()
    engine.store("ab")
    row = engine.publish("abcd")
    engine.tree.unlock(row.receipt, 0)
    assert engine.tree.borders(chain("abcd")) == (4,)
