"""Which bytes go where: from two KV layouts and page lists to coalesced copies. Pure; numpy only.

Ranges are intersected by absolute token position, pages are only containers, components are paired by name. Knows no
transport, no lease and no clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import BadRequest, TransferFailed
from core.kv import Component, ComponentKind, KVLayout
from kv_transfer.api import I64, Records
from kv_transfer.shards import Runs, Take, pair_runs


@dataclass(frozen=True, slots=True)
class Span:
    """Pages of one side for tokens [start, end): `pages[i]` holds tokens from (start // page_tokens + i) * page_tokens."""

    start: int
    end: int
    pages: Sequence[int]


def num_pages(start: int, end: int, page_tokens: int) -> int:
    """Pages that hold any token of [start, end)."""
    return -(-end // page_tokens) - start // page_tokens if end > start else 0


def plan_pages(
    source: KVLayout, target: KVLayout, have: Span, want: Span, max_run_bytes: int, *, take: Take | None = None
) -> list[Records]:
    """Copy the paged components of the tokens that both spans name; every byte of every such page exactly once.

    `take` says what to read of this source when it is one of several ranks (`shards.assign`); None: everything.

    `have` comes from a peer: pages that do not match its range or lie outside its layout raise `TransferFailed`.
    The common range must start on a page border, because a page is copied whole.
    """
    size = target.page_tokens
    start, end = max(have.start, want.start), min(have.end, want.end)
    if start >= end:
        return []
    if start % size:
        raise TransferFailed(f"tokens {start}..{end} do not start on a page border of {size} tokens")
    source_pages = _cut(have, start, end, size, "the source announced")
    target_pages = _cut(want, start, end, size, "the destination allocated")
    copies = [
        _copies((source.component(c.name), c), runs, (source_pages, target_pages), max_run_bytes)
        for c in target.components
        if c.kind is ComponentKind.PAGED and (runs := _runs(source, c, take)) is not None
    ]
    return _by_regions(copies)


def plan_rows(
    source: KVLayout,
    target: KVLayout,
    source_row: int,
    target_row: int,
    max_run_bytes: int,
    *,
    take: Take | None = None,
) -> list[Records]:
    """Copy every component of `target` that belongs to a row (rings and states); `take` as in `plan_pages`."""
    rows = np.array([source_row], np.int64), np.array([target_row], np.int64)
    copies = [
        _copies((source.component(c.name), c), runs, rows, max_run_bytes)
        for c in target.components
        if c.kind is not ComponentKind.PAGED and (runs := _runs(source, c, take)) is not None
    ]
    return _by_regions(copies)


def split(records: Records, max_records: int, max_bytes: int) -> list[Records]:
    """Cut copies larger than `max_bytes` and group the rest in order, so that each part respects both bounds."""
    if len(records.nbytes) <= max_records and records.total_bytes <= max_bytes:
        return [records] if len(records.nbytes) else []
    source, target, nbytes = _cut_large(records, max_bytes)
    ends = np.cumsum(nbytes)
    parts: list[Records] = []
    first = 0
    while first < len(nbytes):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + max_bytes, side="right"))
        last = max(first + 1, min(last, first + max_records))
        cut = slice(first, last)
        parts.append(Records(records.source_region, records.target_region, source[cut], target[cut], nbytes[cut]))
        first = last
    return parts


def check_bounds(records: Records, source_nbytes: int, target_nbytes: int) -> None:
    """Raise `BadRequest` unless all copies are non-empty and lie inside both regions."""
    arrays = (records.source_offsets, records.target_offsets, records.nbytes)
    count = len(records.nbytes)
    if any(a.dtype != np.int64 or a.ndim != 1 or len(a) != count for a in arrays):
        raise BadRequest("records must be three int64 arrays of equal length")
    if not count:
        return
    if int(records.nbytes.min()) <= 0:
        raise BadRequest("a record copies no byte")
    largest = int(records.nbytes.max())
    _check_side("source", records.source_offsets, records.nbytes, largest, source_nbytes)
    _check_side("target", records.target_offsets, records.nbytes, largest, target_nbytes)


def check_ranges(what: str, offsets: I64, nbytes: I64, limit: int) -> None:
    """Raise `BadRequest` unless all ranges (at least one) are non-empty and lie inside a region of `limit` bytes."""
    if int(nbytes.min()) <= 0:
        raise BadRequest("a record copies no byte")
    _check_side(what, offsets, nbytes, int(nbytes.max()), limit)


def _check_side(what: str, offsets: I64, nbytes: I64, largest: int, limit: int) -> None:
    if int(offsets.min()) >= 0 and int(offsets.max()) <= limit - largest:
        return  # as it nearly always is: found without looking at each record
    # Compared as limit - nbytes so that a huge offset cannot wrap around.
    if int(offsets.min()) < 0 or bool((offsets > limit - nbytes).any()):
        raise BadRequest(f"a record lies outside the {what} region of {limit} bytes")


def coalesce(source: I64, target: I64, record_bytes: int, max_run_bytes: int) -> tuple[I64, I64, I64]:
    """Merge neighbours of a list of equal records that are consecutive on both sides, up to `max_run_bytes`.

    Returns (source offsets, target offsets, sizes) of the runs; a single record may exceed the bound.
    """
    n = len(source)
    if n == 0:
        return source, target, np.zeros(0, np.int64)
    index = np.arange(n)
    fresh = np.ones(n, bool)
    fresh[1:] = (np.diff(source) != record_bytes) | (np.diff(target) != record_bytes)
    place_in_run = index - np.maximum.accumulate(np.where(fresh, index, 0))
    first = np.flatnonzero(fresh | (place_in_run % max(1, max_run_bytes // record_bytes) == 0))
    sizes = np.diff(np.append(first, n)) * record_bytes
    return source[first], target[first], sizes.astype(np.int64)


def record_offsets(component: Component, indices: I64) -> I64:
    """Byte offsets of records within the component's region."""
    return component.offset + indices * component.stride_bytes


def _cut(span: Span, start: int, end: int, size: int, who: str) -> I64:
    if len(span.pages) != num_pages(span.start, span.end, size):
        raise TransferFailed(f"{who} {len(span.pages)} pages for tokens {span.start}..{span.end}")
    first = start // size - span.start // size
    return np.asarray(span.pages[first : first + num_pages(start, end, size)], np.int64)


def _runs(source: KVLayout, component: Component, take: Take | None) -> Runs | None:
    return pair_runs(source.component(component.name), component) if take is None else take.get(component.name)


def _copies(
    pair: tuple[Component, Component], runs: Runs, indices: tuple[I64, I64], max_run_bytes: int
) -> tuple[int, int, I64, I64, I64]:
    source, target = pair
    source_index, target_index = indices
    for what, component, index in (("source", source, source_index), ("destination", target, target_index)):
        if int(index.min()) < 0 or int(index.max()) >= component.num_records:
            raise TransferFailed(f"{what} has no record {int(index.max())} in component {component.name}")
    sources, targets = record_offsets(source, source_index), record_offsets(target, target_index)
    if len(runs.nbytes) == 1:
        size = int(runs.nbytes[0])
        whole = coalesce(sources + runs.source[0], targets + runs.target[0], size, max_run_bytes)
        return source.region, target.region, *whole
    inner = ((sources, runs.source), (targets, runs.target))
    offsets = [(records[:, None] + at[None, :]).reshape(-1) for records, at in inner]
    return source.region, target.region, offsets[0], offsets[1], np.tile(runs.nbytes, len(sources))


def _by_regions(copies: Iterable[tuple[int, int, I64, I64, I64]]) -> list[Records]:
    groups: dict[tuple[int, int], list[tuple[I64, I64, I64]]] = {}
    for source_region, target_region, *arrays in copies:
        groups.setdefault((source_region, target_region), []).append((arrays[0], arrays[1], arrays[2]))
    return [
        Records(source_region, target_region, *(np.concatenate(column) for column in zip(*parts, strict=True)))
        for (source_region, target_region), parts in groups.items()
    ]


def _cut_large(records: Records, max_bytes: int) -> tuple[I64, I64, I64]:
    nbytes = records.nbytes
    pieces = -(-nbytes // max_bytes)
    if len(nbytes) == 0 or int(pieces.max()) <= 1:
        return records.source_offsets, records.target_offsets, nbytes
    owner = np.repeat(np.arange(len(nbytes)), pieces)
    shift = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_bytes
    size = np.minimum(max_bytes, nbytes[owner] - shift)
    return records.source_offsets[owner] + shift, records.target_offsets[owner] + shift, size
