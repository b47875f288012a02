"""Each corruption of a tree must be reported under its invariant's name."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from core.ids import PageHash
from engine.cache.page_pool import PagePool
from engine.cache.prefix_tree import PrefixTree
from engine.cache.receipt import HeldRow, Receipt
from engine.events import SeqId


def chain(text):
    return tuple(PageHash(hashlib.sha256(text[: i + 1].encode()).digest()) for i in range(len(text)))


@pytest.fixture
def world():
    """Two rows that share "ab", and an unlocked branch "q"."""
    pool = PagePool(20, 4)
    tree = PrefixTree(pool)
    rows = []
    for owner, text in ((SeqId(1), "abcd"), (SeqId(2), "abxy"), (SeqId(3), "qr")):
        hit = tree.match(chain(text))
        held = hit.num_device
        pages = np.concatenate((hit.pages, pool.allocate(len(text) - held, owner)))
        rows.append(HeldRow(owner, pages, tree.publish(owner, chain(text), pages, tree.lock(hit, held)).receipt))
    tree.unlock(rows.pop().receipt, 0)
    nodes = {len(node.keys) and node.keys[0]: node for node in tree._root.subtree()}
    return SimpleNamespace(
        pool=pool,
        tree=tree,
        rows=rows,
        top=nodes[chain("a")[0]],
        leaf=nodes[chain("abcd")[2]],
        idle=nodes[chain("q")[0]],
    )


def test_a_sound_tree_has_nothing_to_report(world):
    assert world.tree.audit() == []
    assert world.tree.audit(world.rows) == []


def swap_depth(w):
    w.leaf.depth += 1


def lose_parent(w):
    w.leaf.parent = w.idle


def rename_kid(w):
    w.top.kids[chain("z")[0]] = w.top.kids.pop(w.leaf.keys[0])


def lose_a_page(w):
    w.leaf.pages = w.leaf.pages[:1]


def empty_node(w):
    w.idle.keys, w.idle.pages, w.idle.locks = [], w.idle.pages[:0], w.idle.locks[:0]


def grow_a_lock(w):
    w.leaf.locks[:] = 9


def forget_a_lock(w):
    w.top.locks[:] = 1


def miscount_locked(w):
    w.leaf.num_locked = 1


def forget_the_queue(w):
    w.idle.queued = False
    w.tree._leaves._heap.clear()


def queue_without_entry(w):
    w.leaf.queued = True


def touch_the_future(w):
    w.top.touch = w.tree._clock + 1


def touch_the_leaf_alone(w):
    w.leaf.touch = w.top.touch + 1
    w.tree._clock += 5


def miscount_pages(w):
    w.tree._num_pages += 1


def miscount_locks(w):
    w.tree._num_locked -= 1


def lose_a_row(w):
    w.rows.pop()


def use_a_receipt_behind_the_rows_back(w):
    w.tree.unlock(w.rows[0].receipt)


def share_a_receipt(w):
    w.rows.append(HeldRow(SeqId(4), w.rows[0].pages, w.rows[0].receipt))


def stretch_a_receipt(w):
    w.tree._receipts[Receipt(w.idle, 5, 0)] = None


def write_a_foreign_page_into_a_table(w):
    w.rows[0].pages[1] = w.rows[1].pages[3]


def evict_and_forget_to_free(w):
    w.tree.evict(1)


@pytest.mark.parametrize(
    ("corrupt", "name"),
    [
        (swap_depth, "I3"),
        (lose_parent, "I3"),
        (rename_kid, "I3"),
        (lose_a_page, "I3"),
        (empty_node, "I3"),
        (grow_a_lock, "I4"),
        (forget_a_lock, "I5"),
        (miscount_locked, "I4"),
        (forget_the_queue, "I8"),
        (queue_without_entry, "I8"),
        (touch_the_future, "I12"),
        (touch_the_leaf_alone, "I12"),
        (miscount_pages, "I2"),
        (miscount_locks, "I2"),
        (lose_a_row, "I5"),
        (use_a_receipt_behind_the_rows_back, "I5"),
        (share_a_receipt, "I5"),
        (stretch_a_receipt, "I5"),
        (write_a_foreign_page_into_a_table, "I7"),
        (evict_and_forget_to_free, "I1"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_corruption_is_reported_by_name(world, corrupt, name):
    corrupt(world)
    found = world.tree.audit(world.rows)
    assert any(sentence.startswith(name + " ") for sentence in found), found
