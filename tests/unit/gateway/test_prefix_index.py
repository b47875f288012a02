from core.ids import Incarnation
from core.worker import KvEvent, KvEventBatch, KvSnapshot
from gateway.prefix_index import MAX_BUFFERED_BATCHES, Applied, PrefixIndex

A = Incarnation("a")


def stored(sequence, *hashes, kind="stored", medium="device"):
    return KvEventBatch(sequence=sequence, events=(KvEvent(kind=kind, hashes=hashes, medium=medium),))


def following(slots=1, max_pages=100, **settings):
    index = PrefixIndex(**settings)
    for slot in range(slots):
        index.add(slot, A, max_pages)
        index.apply_snapshot(slot, KvSnapshot(incarnation=A, sequence=0, hashes=()))
    return index


def test_matches_count_leading_pages_per_worker():
    index = following(3)
    index.apply(0, stored(1, 1, 2, 3, 4))
    index.apply(1, stored(1, 1, 2))
    assert index.match([1, 2, 3, 4, 5], 3).tolist() == [4, 2, 0]
    assert index.match([9], 3).tolist() == [0, 0, 0]
    assert index.match([], 3).tolist() == [0, 0, 0]


def test_removed_and_cleared_pages_no_longer_match():
    index = following()
    index.apply(0, stored(1, 1, 2, 3))
    index.apply(0, stored(2, 3, kind="removed"))
    assert index.match([1, 2, 3], 1).tolist() == [2]
    index.apply(0, stored(3, kind="cleared"))
    assert index.match([1, 2, 3], 1).tolist() == [0]
    assert len(index) == 0


def test_lower_tiers_are_not_counted_as_device_pages():
    index = following()
    index.apply(0, stored(1, 1, 2, medium="host"))
    assert index.match([1, 2], 1).tolist() == [0]


def test_duplicates_are_ignored():
    index = following()
    index.apply(0, stored(1, 1))
    assert index.apply(0, stored(1, 2)) is Applied.DUPLICATE
    assert index.match([2], 1).tolist() == [0]


def test_a_gap_buffers_until_a_snapshot_heals_it():
    index = following()
    index.apply(0, stored(1, 1))
    assert index.apply(0, stored(3, 3)) is Applied.NEED_SNAPSHOT
    assert index.apply(0, stored(4, 4)) is Applied.NEED_SNAPSHOT
    assert index.is_waiting(0)
    snapshot = KvSnapshot(incarnation=A, sequence=3, hashes=(1, 2, 3))
    assert index.apply_snapshot(0, snapshot) is Applied.DONE
    assert index.match([1, 2, 3, 4], 1).tolist() == [4]
    assert index.apply(0, stored(5, 5)) is Applied.DONE


def test_a_snapshot_that_is_still_behind_the_buffer_asks_again():
    index = following()
    index.apply(0, stored(5, 5))
    assert index.apply_snapshot(0, KvSnapshot(incarnation=A, sequence=3, hashes=(1,))) is Applied.NEED_SNAPSHOT
    assert index.apply_snapshot(0, KvSnapshot(incarnation=A, sequence=4, hashes=(1,))) is Applied.DONE
    assert index.match([5], 1).tolist() == [1]


def test_a_snapshot_of_another_incarnation_is_ignored():
    index = following()
    index.apply(0, stored(2, 2))
    other = KvSnapshot(incarnation=Incarnation("b"), sequence=9, hashes=(7,))
    assert index.apply_snapshot(0, other) is Applied.DUPLICATE
    assert index.is_waiting(0)


def test_a_new_incarnation_in_the_slot_forgets_the_old_pages():
    index = following()
    index.apply(0, stored(1, 1))
    index.expect(0, [8], now=0.0)
    index.add(0, Incarnation("b"), 100)
    assert index.match([1], 1).tolist() == [0]
    assert index.match([8], 1).tolist() == [0]
    assert index.apply(0, stored(1, 5)) is Applied.DONE


def test_the_buffer_is_bounded_and_the_next_snapshot_heals_the_overflow():
    index = following(max_pages=10**6)
    last = MAX_BUFFERED_BATCHES + 10
    for sequence in range(2, last + 1):
        index.apply(0, stored(sequence, sequence))
    assert index.counts.overflows == 1
    snapshot = KvSnapshot(incarnation=A, sequence=last, hashes=tuple(range(1, last + 1)))
    assert index.apply_snapshot(0, snapshot) is Applied.DONE
    assert index.pages(0) == last


def test_a_worker_that_seems_to_hold_more_pages_than_it_has_is_asked_for_a_snapshot():
    index = following(max_pages=2)
    assert index.apply(0, stored(1, 1, 2, 3)) is Applied.NEED_SNAPSHOT


def test_expected_pages_match_for_one_to_two_half_lives():
    index = following(expected_ttl_s=4.0)
    index.expire(10.0)
    index.expect(0, [1, 2], now=10.5)
    index.expire(12.0)
    assert index.match([1, 2], 1).tolist() == [2]
    index.expire(13.9)
    assert index.match([1, 2], 1).tolist() == [2]
    index.expire(14.0)
    assert index.match([1, 2], 1).tolist() == [0]
    assert index.speculative_pages == 0


def test_a_page_expected_by_two_prompts_stays_for_the_later_one():
    index = following(expected_ttl_s=4.0)
    index.expect(0, [1, 2], now=0.0)
    index.expire(2.0)
    index.expect(0, [1, 3], now=2.5)
    index.expire(4.0)
    assert index.match([1, 2], 1).tolist() == [1]
    assert index.match([1, 3], 1).tolist() == [2]


def test_what_a_worker_says_of_a_page_ends_the_expectation():
    index = following()
    index.expect(0, [1, 2], now=0.0)
    index.apply(0, stored(1, 1, 2))
    assert index.speculative_pages == 0
    index.apply(0, stored(2, 2, kind="removed"))
    assert index.match([1, 2], 1).tolist() == [1]
    index.expect(0, [1, 2], now=0.0)
    index.apply(0, stored(3, kind="cleared"))
    assert index.match([1, 2], 1).tolist() == [0]


def test_expectations_are_bounded_oldest_first():
    index = following(max_speculative_pages=4)
    for first in (1, 3, 5):
        index.expect(0, [first, first + 1], now=0.0)
    assert index.speculative_pages == 4
    assert index.match([1], 1).tolist() == [0]
    assert index.match([5, 6], 1).tolist() == [2]


def test_a_worker_that_never_reports_is_known_by_what_it_was_sent_up_to_its_pages():
    index = PrefixIndex()
    index.add(0, A, 4)
    index.expect(0, [1, 2, 3], now=0.0)
    index.expire(1000.0)
    assert index.match([1, 2, 3], 1).tolist() == [3]
    index.expect(0, [1, 8, 9], now=1001.0)
    # Five pages were sent; the deepest of the older prompt is taken to be gone.
    assert index.match([1, 2, 3], 1).tolist() == [2]
    assert index.match([1, 8, 9], 1).tolist() == [3]
    assert index.pages(0) == 4


def test_what_was_remembered_is_void_once_the_worker_reports():
    index = PrefixIndex()
    index.add(0, A, 4)
    index.expect(0, [1, 2], now=0.0)
    index.apply(0, stored(1, 7))
    assert index.match([1, 2], 1).tolist() == [0]
    assert index.match([7], 1).tolist() == [1]
    other = PrefixIndex()
    other.add(0, A, 4)
    other.expect(0, [1, 2], now=0.0)
    other.apply_snapshot(0, KvSnapshot(incarnation=A, sequence=3, hashes=(7,)))
    assert other.match([1, 2], 1).tolist() == [0]
    assert len(other) == 1


def test_dropping_a_worker_leaves_nothing_of_it():
    index = following(2)
    index.apply(0, stored(1, 1, 2))
    index.apply(1, stored(1, 1))
    index.expect(0, [7], now=0.0)
    index.drop(0)
    assert index.match([1, 2], 2).tolist() == [0, 1]
    assert index.match([7], 2).tolist() == [0, 0]
    assert index.apply(0, stored(2, 9)) is Applied.DUPLICATE
