"""The plan against a brute-force oracle: over random layouts, pages and ranges every wanted byte is copied exactly once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core.kv import Component, ComponentKind, KVLayout
from kv_transfer.api import Records
from kv_transfer.plan import Span, check_bounds, num_pages, plan_pages, split

MAX_PAGES = 24


@st.composite
def layouts(draw, names_and_sizes):
    """A layout of the given components with its own strides, offsets, regions and order."""
    parts, used = [], {}
    for name, size in names_and_sizes:
        region = draw(st.integers(0, 1))
        offset = used.get(region, 0) + draw(st.integers(0, 5))
        stride = size + draw(st.sampled_from([0, 0, 3]))
        used[region] = offset + stride * MAX_PAGES
        parts.append(
            Component(
                name=name, kind=ComponentKind.PAGED, record_bytes=size, num_records=MAX_PAGES,
                stride_bytes=stride, offset=offset, region=region,
            )
        )  # fmt: skip
    return KVLayout(page_tokens=draw(st.just(4)), components=tuple(draw(st.permutations(parts))))


@st.composite
def cases(draw):
    sizes = [(f"c{i}", draw(st.integers(1, 9))) for i in range(draw(st.integers(1, 3)))]
    source, target = draw(layouts(sizes)), draw(layouts(sizes))
    pages = st.permutations(range(MAX_PAGES)) if draw(st.booleans()) else st.just(list(range(MAX_PAGES)))

    def span(aligned_start):
        start = draw(st.integers(0, 10)) * 4 if aligned_start else 0
        end = start + draw(st.integers(1, 40))
        return Span(start, end, draw(pages)[: num_pages(start, end, 4)])

    return source, target, span(True), span(True), draw(st.integers(1, 40))


def region_bytes(layout):
    sizes = {}
    for c in layout.components:
        sizes[c.region] = max(sizes.get(c.region, 0), c.offset + c.stride_bytes * c.num_records)
    return sizes


def run(records_list: list[Records], source_memory, target_memory, writes):
    for records in records_list:
        check_bounds(records, len(source_memory[records.source_region]), len(target_memory[records.target_region]))
        for s, t, n in zip(records.source_offsets, records.target_offsets, records.nbytes, strict=True):
            target_memory[records.target_region][t : t + n] = source_memory[records.source_region][s : s + n]
            writes[records.target_region][t : t + n] += 1


@given(cases(), st.integers(1, 6), st.integers(1, 50))
def test_every_wanted_byte_is_copied_exactly_once_and_no_other(case, max_records, max_bytes):
    source, target, have, want, max_run = case
    rng = np.random.default_rng(0)
    source_memory = {r: rng.integers(0, 256, n, dtype=np.uint8) for r, n in region_bytes(source).items()}
    target_memory = {r: np.zeros(n, np.uint8) for r, n in region_bytes(target).items()}
    expected = {r: m.copy() for r, m in target_memory.items()}
    expected_writes = {r: np.zeros(n, int) for r, n in region_bytes(target).items()}

    # The oracle goes page by page and component by component, with no arithmetic on runs.
    for index in range(200):
        token = index * 4
        if not (have.start <= token < have.end and want.start <= token < want.end):
            continue
        source_page, target_page = have.pages[index - have.start // 4], want.pages[index - want.start // 4]
        for c in target.components:
            d = source.component(c.name)
            s, t = d.offset + d.stride_bytes * source_page, c.offset + c.stride_bytes * target_page
            expected[c.region][t : t + c.record_bytes] = source_memory[d.region][s : s + c.record_bytes]
            expected_writes[c.region][t : t + c.record_bytes] += 1

    writes = {r: np.zeros(n, int) for r, n in region_bytes(target).items()}
    planned = plan_pages(source, target, have, want, max_run)
    parts = [part for records in planned for part in split(records, max_records, max_bytes)]
    assert all(len(p.nbytes) <= max_records and p.total_bytes <= max_bytes for p in parts)
    run(parts, source_memory, target_memory, writes)
    for region in tuple(target_memory):
        assert np.array_equal(writes[region], expected_writes[region])
        assert np.array_equal(target_memory[region], expected[region])


@given(cases())
def test_runs_are_maximal_up_to_their_bound(case):
    """Two neighbours of one component that could have been one copy never stay two, unless the bound says so."""
    source, target, have, want, max_run = case
    for name in (c.name for c in target.components):
        one = KVLayout(page_tokens=4, components=(target.component(name),))
        other = KVLayout(page_tokens=4, components=(source.component(name),))
        size = target.component(name).record_bytes
        for records in plan_pages(other, one, have, want, max_run):
            s, t, n = records.source_offsets, records.target_offsets, records.nbytes
            joined = (s[:-1] + n[:-1] == s[1:]) & (t[:-1] + n[:-1] == t[1:])
            assert (n[:-1][joined] == max(1, max_run // size) * size).all()
