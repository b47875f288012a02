"""Who holds which page: fed by the workers' KV events and by our own dispatches.

Three layers. *Reported*: exact, per incarnation, sequence-numbered, healed by snapshots. *Expected*: pages of prompts
just dispatched, until their worker reports them, reports them removed, or a time has passed. *Remembered*: the pages
we sent to a worker that has reported nothing yet, least recently sent forgotten first: all there is for a worker
without events. Pure state, one thread, no I/O: a caller that is told of a gap fetches a snapshot and applies it.
Every set is prefix-closed (parents are stored before and removed after children), so a walk may jump.
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.ids import Incarnation
from core.worker import KvEvent, KvEventBatch, KvSnapshot
from gateway.page_table import PageTable

MAX_BUFFERED_BATCHES = 1024
"""Live batches kept while a snapshot is fetched; more are dropped, and the next snapshot heals that too."""
DEVICE = "device"
FEW = 64
"""Slots up to which a loop over the bits of a set is faster than unpacking it."""


class Applied(enum.Enum):
    """What became of a batch or snapshot."""

    DONE = "done"
    DUPLICATE = "duplicate"
    NEED_SNAPSHOT = "need_snapshot"
    """Something is missing; batches are buffered until a snapshot of this incarnation arrives."""


@dataclass(slots=True)
class _Holder:
    """One worker: where its event stream stands."""

    incarnation: Incarnation
    max_pages: int
    sequence: int = 0
    waiting: bool = False
    buffer: deque[KvEventBatch] = field(default_factory=deque)
    remembered: OrderedDict[int, None] | None = field(default_factory=OrderedDict)
    """Pages sent there, least recently first; None once it reports itself."""


@dataclass(slots=True)
class IndexCounts:
    """Figures for metrics."""

    resyncs: int = 0
    gaps: int = 0
    overflows: int = 0


class PrefixIndex:
    """The pages of all workers. Slots are the fleet's; `add` before and `drop` after a slot's use."""

    def __init__(self, *, max_speculative_pages: int = 200_000, expected_ttl_s: float = 30.0) -> None:
        self._reported = PageTable()
        # Two generations instead of a deadline for each page: a page is expected for one to two half lives.
        self._young, self._old = PageTable(), PageTable()
        self._turned_at = 0.0
        self._half_s = expected_ttl_s / 2
        self._max_young = max_speculative_pages // 2
        self._holders: dict[int, _Holder] = {}
        self.counts = IndexCounts()

    # Reported pages

    def add(self, slot: int, incarnation: Incarnation, max_pages: int) -> None:
        """Start to follow a worker; pages of another incarnation in this slot are forgotten, the same is kept."""
        holder = self._holders.get(slot)
        if holder is not None and holder.incarnation == incarnation:
            return
        self.drop(slot)
        self._holders[slot] = _Holder(incarnation, max_pages)

    def drop(self, slot: int) -> None:
        """Forget a worker and all its pages."""
        self._holders.pop(slot, None)
        for table in (self._reported, self._young, self._old):
            table.drop(slot)

    def apply(self, slot: int, batch: KvEventBatch) -> Applied:
        """Take one batch of a worker. Old ones are ignored; after a gap all wait for a snapshot."""
        holder = self._holders.get(slot)
        if holder is None or batch.sequence <= holder.sequence:
            return Applied.DUPLICATE
        if holder.waiting or batch.sequence != holder.sequence + 1:
            self.counts.gaps += not holder.waiting
            self._buffer(holder, batch)
            return Applied.NEED_SNAPSHOT
        self._believe(holder, slot)
        for event in batch.events:
            self._event(slot, event)
        holder.sequence = batch.sequence
        return self._check_bound(holder, slot)

    def apply_snapshot(self, slot: int, snapshot: KvSnapshot) -> Applied:
        """Replace a worker's pages by a snapshot, then apply what was buffered behind it."""
        holder = self._holders.get(slot)
        if holder is None or snapshot.incarnation != holder.incarnation or snapshot.sequence < holder.sequence:
            return Applied.DUPLICATE
        self.counts.resyncs += 1
        holder.waiting = False
        holder.remembered = None
        self._reported.drop(slot)
        self._reported.add(slot, snapshot.hashes)
        holder.sequence = snapshot.sequence
        later = sorted(holder.buffer, key=lambda batch: batch.sequence)
        holder.buffer.clear()
        for batch in later:
            self.apply(slot, batch)
        return Applied.NEED_SNAPSHOT if holder.waiting else Applied.DONE

    # Expected pages

    def expect(self, slot: int, hashes: Sequence[int], now: float) -> None:
        """A prompt was sent to this worker: its pages count as present there until it says otherwise, or for a while."""
        holder = self._holders.get(slot)
        if not hashes or holder is None or len(hashes) > self._max_young:
            return
        if holder.remembered is not None:
            self._remember(holder, holder.remembered, slot, hashes)
            return
        if len(self._young) + len(hashes) > self._max_young:
            self._turn(now)
        self._young.add(slot, hashes)

    def expire(self, now: float) -> None:
        """Forget the expectations of the generation before the last."""
        if now - self._turned_at >= self._half_s:
            self._turn(now)

    # Questions

    def match(self, hashes: Sequence[int], slots: int) -> NDArray[np.int64]:
        """Return for each of `slots` slots how many leading pages of `hashes` it holds or will soon hold."""
        matched = np.zeros(slots, dtype=np.int64)
        for mask, length in self.prefixes(hashes):
            _set(matched, mask, length)
        return matched

    def prefixes(self, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Return (bit set of slots, leading pages of `hashes` that they hold or will soon hold); of a slot named twice
        the later counts, one not named holds none.
        """
        reported, young, old = self._reported.get, self._young.get, self._old.get
        if not hashes or not (first := reported(hashes[0]) | young(hashes[0]) | old(hashes[0])):
            return []
        # Sets shrink along the chain: where both ends of a stretch have equal holders, nobody left in between.
        last = len(hashes) - 1
        final = reported(hashes[last]) | young(hashes[last]) | old(hashes[last])
        found = [(final & first, last + 1)] if final & first else []
        stretches = [(0, first, last, final)]
        while stretches:
            low, there, high, then = stretches.pop()
            left = there & ~then
            if not left:
                continue
            if high == low + 1:
                found.append((left, high))
                continue
            middle = (low + high) // 2
            page = hashes[middle]
            between = reported(page) | young(page) | old(page)
            stretches.append((low, there, middle, between))
            stretches.append((middle, between, high, then))
        return found

    def pages(self, slot: int) -> int:
        """Return the number of pages a worker reported, or that we remember for it."""
        return self._reported.pages(slot)

    def is_waiting(self, slot: int) -> bool:
        """True while a worker's pages are not known exactly."""
        holder = self._holders.get(slot)
        return holder is not None and holder.waiting

    def __len__(self) -> int:
        return len(self._reported)

    @property
    def speculative_pages(self) -> int:
        """Expectations now held: never more than the bound."""
        return len(self._young) + len(self._old)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._reported.nbytes + self._young.nbytes + self._old.nbytes

    # Book-keeping

    def _believe(self, holder: _Holder, slot: int) -> None:
        """The worker reports itself: what we remembered for it is void."""
        if holder.remembered is not None:
            holder.remembered = None
            self._reported.drop(slot)

    def _remember(self, holder: _Holder, pages: OrderedDict[int, None], slot: int, hashes: Sequence[int]) -> None:
        # Backwards, so that a parent is always newer than its children and goes after them.
        for page in reversed(hashes):
            pages[page] = None
            pages.move_to_end(page)
        self._reported.add(slot, hashes)
        while len(pages) > holder.max_pages:
            self._reported.discard(slot, (pages.popitem(last=False)[0],))

    def _buffer(self, holder: _Holder, batch: KvEventBatch) -> None:
        holder.waiting = True
        if len(holder.buffer) >= MAX_BUFFERED_BATCHES:
            self.counts.overflows += 1
            holder.buffer.clear()
        holder.buffer.append(batch)

    def _event(self, slot: int, event: KvEvent) -> None:
        if event.medium != DEVICE:
            return  # lower tiers are not scored yet
        if event.kind == "stored":
            self._reported.add(slot, event.hashes)
        elif event.kind == "removed":
            self._reported.discard(slot, event.hashes)
        elif event.kind == "cleared":
            for table in (self._reported, self._young, self._old):
                table.drop(slot)
            return
        self._young.discard(slot, event.hashes)
        self._old.discard(slot, event.hashes)

    def _turn(self, now: float) -> None:
        self._turned_at = now
        self._young, self._old = PageTable(), self._young

    def _check_bound(self, holder: _Holder, slot: int) -> Applied:
        """A worker cannot hold more pages than it has: if it seems to, removals were lost."""
        if self._reported.pages(slot) <= holder.max_pages:
            return Applied.DONE
        self.counts.overflows += 1
        holder.waiting = True
        return Applied.NEED_SNAPSHOT


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        mask ^= lowest
        yield lowest.bit_length() - 1


def _set(matched: NDArray[np.int64], mask: int, value: int) -> None:
    """matched[slot] = value for every bit of `mask` that is a slot of the array."""
    if len(matched) <= FEW:
        for slot in bits(mask):
            if slot < len(matched):
                matched[slot] = value
        return
    size = (mask.bit_length() + 7) // 8
    raw = np.frombuffer(mask.to_bytes(size, "little"), dtype=np.uint8)
    slots = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
    matched[slots[slots < len(matched)]] = value
