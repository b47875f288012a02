"""An audit that can not fail is worthless: each corruption must be reported under its invariant's name."""

import numpy as np
import pytest

from engine.cache.page_pool import PagePool
from engine.cache.page_state import PageState
from engine.events import SeqId

ALICE, BOB = SeqId(1), SeqId(2)


@pytest.fixture
def pool():
    pool = PagePool(10, 16)
    pool.allocate(2, ALICE)  # 1, 2
    pool.to_tree(pool.allocate(2, ALICE), ALICE)  # 3, 4
    pool.free(pool.allocate(1, ALICE), fence=1)  # 5
    return pool


def audit(pool):
    return pool.audit(owned={ALICE: [1, 2]}, tree_pages=[3, 4])


def test_a_sound_pool_has_nothing_to_report(pool):
    assert audit(pool) == []


@pytest.mark.parametrize(
    ("corrupt", "name"),
    [
        (lambda p: p._num.__setitem__(PageState.FREE, 3), "I2"),
        (lambda p: p._state.__setitem__(1, PageState.FREE), "I1 pages [1] are FREE but not in the free list"),
        (lambda p: p._state.__setitem__(9, PageState.PRIVATE), "I1 page 9 is PRIVATE and has owner -1"),
        (lambda p: p._state.__setitem__(0, PageState.FREE), "I1 page 0"),
        (lambda p: p._owner.__setitem__(3, ALICE), "I1 page 3 is TREE"),
        (lambda p: p._free.__setitem__(0, 8), "I1 the free list names a page twice"),
        (lambda p: p._free.__setitem__(0, 1), "I1 the free list holds pages [1]"),
        (lambda p: p._fenced.clear(), "I1 pages [5] are FENCED"),
        (lambda p: p._fenced.append((1, np.asarray([5]))), "I1 the fence list names a page twice"),
        (lambda p: setattr(p, "_retired", 1), "I1 a fence of step 1"),
        (lambda p: p.to_tree([1], ALICE), "I1 pages [1] are TREE but not in the tree"),
        (lambda p: p.allocate(1, BOB), "I2 page 6 of sequence 2 is held by nobody"),
        (lambda p: p._owner.__setitem__(2, BOB), "I1 sequence 1 holds page 2"),
        (lambda p: p.free([1], 0), "I1 sequence 1 holds page 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_corruption_is_reported_by_name(pool, corrupt, name):
    corrupt(pool)
    assert any(sentence.startswith(name) for sentence in audit(pool)), audit(pool)


def test_a_page_held_by_two_sequences_is_reported(pool):
    found = pool.audit(owned={ALICE: [1, 2], BOB: [2]})
    assert "I1 page 2 is held by sequences 1 and 2" in found
