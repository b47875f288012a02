import numpy as np
import pytest

from core.errors import InvariantError
from engine.cache.page_pool import PagePool
from engine.cache.page_state import PageState
from engine.events import SeqId

ALICE, BOB = SeqId(1), SeqId(2)


def test_a_fresh_pool_hands_out_low_pages_first_and_never_the_sink():
    pool = PagePool(5, 16)
    assert pool.allocate(4, ALICE).tolist() == [1, 2, 3, 4]
    assert pool.states([0]).tolist() == [PageState.SINK]


def test_allocate_returns_none_and_changes_nothing_when_too_few_pages_are_free():
    pool = PagePool(5, 16)
    assert pool.allocate(5, ALICE) is None
    assert pool.num_free == 4
    assert pool.audit(owned={}) == []


def test_allocating_nothing_is_legal():
    pages = PagePool(2, 16).allocate(0, ALICE)
    assert pages.dtype == np.int32
    assert len(pages) == 0


def test_every_allocation_bumps_the_epoch_of_its_pages_only():
    pool = PagePool(4, 16)
    first = pool.allocate(1, ALICE)
    before = pool.epochs(first)
    pool.free(first, 0)
    again = pool.allocate(1, BOB)
    assert again.tolist() == first.tolist()
    assert pool.epochs(again).tolist() == (before + 1).tolist()
    assert pool.epochs([3]).tolist() == [0]


def test_epochs_wrap_around():
    pool = PagePool(2, 16)
    pool._epoch[1] = 2**32 - 1
    assert pool.epochs(pool.allocate(1, ALICE)).tolist() == [0]


def test_a_freed_page_waits_for_its_fence():
    pool = PagePool(3, 16)
    pages = pool.allocate(2, ALICE)
    pool.free(pages, fence=2)
    assert (pool.num_free, pool.num_fenced, pool.num_retiring(1), pool.num_retiring(2)) == (0, 2, 0, 2)
    assert pool.retire(1) == 0
    assert pool.retire(2) == 2
    assert pool.num_free == 2


def test_a_page_whose_fence_has_retired_is_free_at_once():
    pool = PagePool(3, 16)
    pool.retire(7)
    pool.free(pool.allocate(2, ALICE), fence=7)
    assert pool.num_free == 2


def test_a_tree_page_that_idles_since_a_retired_step_needs_no_fence():
    pool = PagePool(4, 16)
    pages = pool.allocate(3, ALICE)
    pool.to_tree(pages, ALICE)
    pool.note_use(pages[:1], 3)
    pool.note_use(pages[1:2], 5)
    pool.retire(3)
    pool.free(pages, fence=6)
    assert pool.states(pages).tolist() == [PageState.FREE, PageState.FENCED, PageState.FENCED]


def test_an_allocation_forgets_when_the_page_was_used_before():
    pool = PagePool(2, 16)
    page = pool.allocate(1, ALICE)
    pool.to_tree(page, ALICE)
    pool.note_use(page, 0)
    pool.free(page, 1)
    page = pool.allocate(1, BOB)
    pool.to_tree(page, BOB)
    pool.free(page, 1)
    assert pool.num_fenced == 1


def test_steps_do_not_retire_backwards():
    pool = PagePool(2, 16)
    pool.retire(4)
    with pytest.raises(InvariantError):
        pool.retire(3)


def test_a_landing_becomes_private_by_commit():
    pool = PagePool(4, 16)
    pages = pool.allocate_landing(2, ALICE)
    assert pool.count(PageState.LANDING) == 2
    pool.commit_landing(pages, ALICE)
    assert pool.expect_private(pages, ALICE).tolist() == pages.tolist()


def test_an_abandoned_landing_keeps_only_its_open_pages_back():
    pool = PagePool(5, 16)
    pages = pool.allocate_landing(4, ALICE)
    pool.abandon_landing(pages, pages[1:3])
    assert (pool.num_free, pool.num_unproven) == (2, 2)
    assert pool.owners(pages[1:3]).tolist() == [ALICE, ALICE]
    pool.prove(pages[1:3])
    assert (pool.num_free, pool.num_unproven) == (4, 0)


def test_open_pages_must_be_among_the_abandoned_ones():
    pool = PagePool(5, 16)
    pages = pool.allocate_landing(4, ALICE)
    with pytest.raises(InvariantError):
        pool.abandon_landing(pages[:2], pages[2:])
    assert pool.count(PageState.LANDING) == 4


def test_prove_is_refused_for_every_other_state():
    pool = PagePool(8, 16)
    private, tree, landing = pool.allocate(1, ALICE), pool.allocate(1, ALICE), pool.allocate_landing(1, ALICE)
    loading, fenced = pool.allocate_loading(1, ALICE), pool.allocate(1, ALICE)
    pool.to_tree(tree, ALICE)
    pool.free(fenced, 1)
    for pages in (private, tree, landing, loading, fenced, [7], [0]):
        with pytest.raises(InvariantError):
            pool.prove(pages)


def test_a_load_becomes_private_or_waits_for_its_fence():
    pool = PagePool(4, 16)
    good, bad = pool.allocate_loading(1, ALICE), pool.allocate_loading(1, BOB)
    pool.commit_loading(good, ALICE)
    pool.abandon_loading(bad, fence=1)
    assert pool.states([*good, *bad]).tolist() == [PageState.PRIVATE, PageState.FENCED]


def test_pages_of_another_sequence_can_not_be_freed_donated_or_committed():
    pool = PagePool(4, 16)
    page, landing = pool.allocate(1, ALICE), pool.allocate_landing(1, ALICE)
    with pytest.raises(InvariantError):
        pool.free(page, 0, BOB)
    with pytest.raises(InvariantError):
        pool.to_tree(page, BOB)
    with pytest.raises(InvariantError):
        pool.commit_landing(landing, BOB)
    assert pool.audit(owned={ALICE: [*page, *landing]}) == []


def test_a_refused_call_with_some_good_pages_changes_nothing():
    pool = PagePool(5, 16)
    mine = pool.allocate(2, ALICE)
    with pytest.raises(InvariantError):
        pool.free([*mine, 4], 0)
    assert pool.audit(owned={ALICE: mine.tolist()}) == []


def test_unknown_negative_and_repeated_pages_are_refused():
    pool = PagePool(3, 16)
    pages = pool.allocate(2, ALICE)
    for wrong in ([3], [-1], [1, 1], [1, 2, 1]):
        with pytest.raises(InvariantError):
            pool.free(wrong, 0)
    assert pool.audit(owned={ALICE: pages.tolist()}) == []


def test_a_pool_without_a_usable_page_is_refused():
    with pytest.raises(InvariantError):
        PagePool(1, 16)


def test_returned_arrays_belong_to_the_caller():
    pool = PagePool(4, 16)
    pages = pool.allocate(2, ALICE)
    pages[:] = 0
    pool.states()[:] = 0
    assert pool.audit(owned={ALICE: [1, 2]}) == []


def test_one_page_for_each_of_many_owners():
    pool = PagePool(5, 16)
    pages = pool.allocate_each(np.asarray([BOB, ALICE, BOB]))
    assert pool.owners(pages).tolist() == [BOB, ALICE, BOB]
    assert pool.allocate_each(np.asarray([BOB, ALICE])) is None
    assert pool.audit(owned={ALICE: [2], BOB: [1, 3]}) == []


def test_nobody_can_not_own_a_page():
    pool = PagePool(5, 16)
    with pytest.raises(InvariantError):
        pool.allocate(1, SeqId(-1))
    with pytest.raises(InvariantError):
        pool.allocate_each(np.asarray([ALICE, -1]))
    with pytest.raises(InvariantError):
        pool.allocate(-1, ALICE)
