import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvariantError
from core.ids import PageHash
from engine.cache.node import Node, walk


def key(number):
    return PageHash(number.to_bytes(32, "big"))


def node(count, depth=0, parent=None):
    keys = [key(depth + i) for i in range(count)]
    made = Node(parent, depth, keys, np.arange(100 + depth, 100 + depth + count, dtype=np.int32))
    if parent is not None:
        parent.kids[keys[0]] = made
    return made


def root():
    return Node(None, 0, [], np.zeros(0, np.int32))


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 50), st.integers(0, 39))
def test_match_equals_a_linear_scan(count, equal, total, start):
    made = node(count, 3)
    start = 3 + min(start, count)
    chain = [key(i) if i < equal else key(1000 + i) for i in range(total)]
    expected = 0
    while start + expected < min(total, made.end) and chain[start + expected] == made.keys[start + expected - 3]:
        expected += 1
    assert made.match(chain, start) == expected


def test_a_split_keeps_pages_locks_and_access_on_both_parts():
    top = root()
    lower = node(5, 0, top)
    lower.touch = 7
    lower.lock(0, 4)
    lower.lock(0, 2)
    upper = lower.split(3)
    assert (upper.pages.tolist(), lower.pages.tolist()) == ([100, 101, 102], [103, 104])
    assert (upper.locks.tolist(), lower.locks.tolist()) == ([2, 2, 1], [1, 0])
    assert (upper.num_locked, lower.num_locked) == (3, 1)
    assert (upper.touch, lower.touch, lower.depth) == (7, 7, 3)
    assert walk(top, [key(i) for i in range(5)]) == ([top, upper, lower], 5)


def test_a_lock_tells_how_many_pages_got_their_first():
    made = node(5)
    assert made.lock(0, 3) == 3
    assert made.lock(0, 2) == 0
    assert made.lock(0, 5) == 2
    assert made.unlock(5) == 2
    assert made.unlock(2) == 0
    assert made.unlock(3) == 3
    assert made.num_locked == 0


def test_a_lock_with_a_gap_above_it_is_refused():
    with pytest.raises(InvariantError):
        node(5).lock(2, 3)


def test_unlocking_what_is_not_locked_is_refused():
    made = node(5)
    made.lock(0, 2)
    with pytest.raises(InvariantError):
        made.unlock(3)


def test_locked_pages_can_not_be_trimmed():
    made = node(5)
    made.lock(0, 3)
    assert made.trim(2)[1].tolist() == [103, 104]
    with pytest.raises(InvariantError):
        made.trim(1)


def test_pages_handed_out_do_not_change_when_the_node_grows_or_shrinks():
    made = node(3)
    seen = made.pages[:2]
    made.extend([key(3)], np.asarray([9], np.int32))
    made.trim(3)
    assert seen.tolist() == [100, 101]
