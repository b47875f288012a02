import numpy as np

from core.ids import PageHash
from engine.cache.leaf_queue import LeafQueue
from engine.cache.node import Node


def leaf(touch, pages=2):
    made = Node(None, 0, [PageHash(bytes([i]) * 32) for i in range(pages)], np.arange(pages, dtype=np.int32))
    made.touch = touch
    return made


def test_the_least_recently_used_leaf_comes_first():
    queue = LeafQueue()
    old, new = leaf(1), leaf(2)
    queue.push(new)
    queue.push(old)
    assert [queue.pop(), queue.pop(), queue.pop()] == [old, new, None]


def test_a_leaf_used_since_it_was_queued_takes_its_new_place():
    queue = LeafQueue()
    first, second = leaf(1), leaf(2)
    queue.push(first)
    queue.push(second)
    first.touch = 3
    assert [queue.pop(), queue.pop()] == [second, first]


def test_a_leaf_locked_or_grown_since_it_was_queued_is_dropped():
    queue = LeafQueue()
    locked, inner = leaf(1), leaf(2)
    queue.push(locked)
    queue.push(inner)
    locked.lock(0, 2)
    inner.kids[PageHash(b"k" * 32)] = leaf(3)
    assert queue.pop() is None
    assert not locked.queued


def test_a_leaf_is_queued_once_and_only_if_it_can_lose_pages():
    queue = LeafQueue()
    once, never = leaf(1), leaf(2)
    never.lock(0, 2)
    for made in (once, once, never):
        queue.push(made)
    assert queue.nodes() == (once,)


def test_a_cleared_queue_takes_the_same_leaf_again():
    queue = LeafQueue()
    made = leaf(1)
    queue.push(made)
    queue.clear()
    queue.push(made)
    assert queue.pop() is made
