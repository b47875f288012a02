"""Copies between two layouts: coalescing, intersection by token position, limits, bounds."""

import numpy as np
import pytest

from core.errors import BadRequest, TransferFailed
from kv_transfer.api import Records
from kv_transfer.plan import Span, check_bounds, coalesce, num_pages, plan_pages, plan_rows, split
from tests.fakes.kv_pools import make_layout

MAX = 1 << 20


def arrays(*columns):
    return [np.array(column, np.int64) for column in columns]


def as_list(records: Records):
    return list(
        zip(records.source_offsets.tolist(), records.target_offsets.tolist(), records.nbytes.tolist(), strict=True)
    )


def test_consecutive_pages_on_both_sides_become_one_copy():
    layout = make_layout(num_pages=64, page_bytes=100, index_bytes=10, rows=False)
    kv, index = plan_pages(layout, layout, Span(0, 64, [3, 4, 5, 9]), Span(0, 64, [7, 8, 9, 10]), MAX)
    assert as_list(kv) == [(300, 700, 300), (900, 1000, 100)]
    assert as_list(index) == [(30, 70, 30), (90, 100, 10)]
    assert (kv.source_region, kv.target_region, index.source_region) == (0, 0, 1)


def test_gaps_between_records_keep_copies_apart():
    source = make_layout(num_pages=64, index_bytes=10, gap=6, rows=False)
    target = make_layout(num_pages=64, index_bytes=10, rows=False)
    _, index = plan_pages(source, target, Span(0, 32, [3, 4]), Span(0, 32, [7, 8]), MAX)
    assert as_list(index) == [(48, 70, 10), (64, 80, 10)]


def test_runs_are_cut_at_the_largest_copy():
    source, target, nbytes = coalesce(*arrays(range(0, 70, 10), range(100, 170, 10)), 10, 30)
    assert source.tolist() == [0, 30, 60]
    assert target.tolist() == [100, 130, 160]
    assert nbytes.tolist() == [30, 30, 10]


def test_a_record_larger_than_the_largest_copy_stays_whole():
    assert coalesce(*arrays([0, 50], [0, 50]), 50, 30)[2].tolist() == [50, 50]


def test_only_tokens_that_both_sides_name_are_copied():
    layout = make_layout(num_pages=64, page_bytes=100, rows=False)
    kv, _ = plan_pages(layout, layout, Span(0, 80, [1, 2, 3, 4, 5]), Span(32, 64, [20, 30]), MAX)
    assert as_list(kv) == [(300, 2000, 100), (400, 3000, 100)]


def test_a_partial_last_page_is_copied_whole():
    layout = make_layout(num_pages=64, page_bytes=100, rows=False)
    kv, _ = plan_pages(layout, layout, Span(16, 33, [2, 4]), Span(16, 33, [9, 6]), MAX)
    assert as_list(kv) == [(200, 900, 100), (400, 600, 100)]


def test_ranges_that_do_not_meet_copy_nothing():
    layout = make_layout(num_pages=64, rows=False)
    assert plan_pages(layout, layout, Span(0, 16, [1]), Span(16, 32, [2]), MAX) == []


@pytest.mark.parametrize(
    "have",
    [Span(0, 32, [1]), Span(0, 32, [1, 2, 3]), Span(0, 32, [1, 64]), Span(0, 32, [-1, 2]), Span(0, 32, [1, 2**40])],
)
def test_pages_that_do_not_match_the_announcement_are_refused(have):
    layout = make_layout(num_pages=64, rows=False)
    with pytest.raises(TransferFailed):
        plan_pages(layout, layout, have, Span(0, 32, [5, 6]), MAX)


def test_a_common_range_that_starts_inside_a_page_is_refused():
    layout = make_layout(num_pages=64, rows=False)
    with pytest.raises(TransferFailed, match="page border"):
        plan_pages(layout, layout, Span(8, 32, [1, 2]), Span(0, 32, [5, 6]), MAX)


def test_row_components_are_copied_whole_and_paged_ones_are_not():
    layout = make_layout(num_pages=8)
    ring, state = plan_rows(layout, layout, 2, 3, MAX)
    assert as_list(ring) == [(320, 480, 160)]
    assert as_list(state) == [(128, 192, 48)]


def test_a_row_outside_the_layout_is_refused():
    layout = make_layout(num_pages=8)
    with pytest.raises(TransferFailed):
        plan_rows(layout, layout, 4, 0, MAX)


def test_components_are_paired_by_name_whatever_their_order():
    layout = make_layout(num_pages=8)
    turned = type(layout)(page_tokens=layout.page_tokens, components=layout.components[::-1])
    straight = plan_pages(layout, layout, Span(0, 16, [1]), Span(0, 16, [2]), MAX)
    crossed = plan_pages(turned, layout, Span(0, 16, [1]), Span(0, 16, [2]), MAX)
    assert [as_list(r) for r in straight] == [as_list(r) for r in crossed]


def test_a_split_respects_both_limits_and_keeps_the_order():
    records = Records(0, 0, *arrays([0, 10, 20, 30], [5, 15, 25, 35], [4, 4, 4, 4]))
    parts = split(records, 3, 8)
    assert [as_list(p) for p in parts] == [[(0, 5, 4), (10, 15, 4)], [(20, 25, 4), (30, 35, 4)]]
    assert [len(p.nbytes) for p in split(records, 3, 100)] == [3, 1]


def test_copies_larger_than_an_operation_are_cut():
    records = Records(0, 0, *arrays([100, 0], [200, 50], [25, 3]))
    flat = [copy for part in split(records, 2, 10) for copy in as_list(part)]
    assert flat == [(100, 200, 10), (110, 210, 10), (120, 220, 5), (0, 50, 3)]


def test_nothing_splits_into_nothing():
    assert split(Records(0, 0, *arrays([], [], [])), 4, 10) == []


def test_bounds_hold_for_int64_extremes():
    top = 2**63 - 1
    with pytest.raises(BadRequest):
        check_bounds(Records(0, 0, *arrays([top], [0], [top])), 100, 100)
    with pytest.raises(BadRequest):
        check_bounds(Records(0, 0, *arrays([0], [top - 1], [2])), 100, 100)


def test_unequal_arrays_are_refused():
    with pytest.raises(BadRequest):
        check_bounds(Records(0, 0, *arrays([0, 1], [0], [1])), 100, 100)
    with pytest.raises(BadRequest):
        check_bounds(Records(0, 0, np.zeros(1, np.int32), *arrays([0], [1])), 100, 100)


@pytest.mark.parametrize(("start", "end", "pages"), [(0, 0, 0), (0, 1, 1), (0, 16, 1), (15, 17, 2), (16, 33, 2)])
def test_the_number_of_pages_of_a_range(start, end, pages):
    assert num_pages(start, end, 16) == pages
