"""Who holds which page: event hash -> bit set of worker slots, fed by KV events and by our own dispatches.

Two layers: what workers reported (exact, per incarnation, sequence-numbered, healed by snapshots) and what we
expect soon (speculative: pages of prompts just dispatched, which expire). Pure state, one thread, no I/O: a caller
that is told of a gap fetches a snapshot and applies it. Every set is prefix-closed (parents are stored before and
removed after children), so a walk along a prompt may jump instead of asking page by page.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.ids import Incarnation
from core.worker import KvEvent, KvEventBatch, KvSnapshot

MAX_BUFFERED_BATCHES = 1024
"""Live batches kept while a snapshot is fetched; more are dropped, and the next snapshot heals that too."""
DEVICE = "device"


class Applied(enum.Enum):
    """What became of a batch or snapshot."""

    DONE = "done"
    DUPLICATE = "duplicate"
    NEED_SNAPSHOT = "need_snapshot"
    """Something is missing; batches are buffered until a snapshot of this incarnation arrives."""


@dataclass(slots=True)
class _Holder:
    """One worker's reported pages and where its event stream stands."""

    incarnation: Incarnation
    max_pages: int
    sequence: int = 0
    hashes: set[int] = field(default_factory=set)
    waiting: bool = False
    buffer: deque[KvEventBatch] = field(default_factory=deque)


@dataclass(slots=True)
class IndexCounts:
    """Figures for metrics."""

    resyncs: int = 0
    gaps: int = 0
    overflows: int = 0


class PrefixIndex:
    """The pages of all workers. Slots are the fleet's; `add` before and `drop` after a slot's use."""

    def __init__(self, *, max_speculative_pages: int = 200_000, expected_ttl_s: float = 5.0) -> None:
        self._reported: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._references: dict[tuple[int, int], int] = {}
        self._pending: deque[tuple[float, int, tuple[int, ...]]] = deque()
        self._pending_pages = 0
        self._max_speculative = max_speculative_pages
        self._expected_ttl_s = expected_ttl_s
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
        """Forget a worker and all its pages, reported and expected."""
        holder = self._holders.pop(slot, None)
        if holder is not None:
            self._replace(holder, slot, ())
        kept: deque[tuple[float, int, tuple[int, ...]]] = deque()
        for entry in self._pending:
            if entry[1] == slot:
                self._unexpect(slot, entry[2])
            else:
                kept.append(entry)
        self._pending = kept

    def apply(self, slot: int, batch: KvEventBatch) -> Applied:
        """Take one batch of a worker. Old ones are ignored; after a gap all wait for a snapshot."""
        holder = self._holders.get(slot)
        if holder is None or batch.sequence <= holder.sequence:
            return Applied.DUPLICATE
        if holder.waiting or batch.sequence != holder.sequence + 1:
            self.counts.gaps += not holder.waiting
            self._buffer(holder, batch)
            return Applied.NEED_SNAPSHOT
        self._take(holder, slot, batch)
        return self._check_bound(holder)

    def apply_snapshot(self, slot: int, snapshot: KvSnapshot) -> Applied:
        """Replace a worker's pages by a snapshot, then apply what was buffered behind it."""
        holder = self._holders.get(slot)
        if holder is None or snapshot.incarnation != holder.incarnation or snapshot.sequence < holder.sequence:
            return Applied.DUPLICATE
        self.counts.resyncs += 1
        holder.waiting = False
        self._replace(holder, slot, snapshot.hashes)
        holder.sequence = snapshot.sequence
        later = sorted(holder.buffer, key=lambda batch: batch.sequence)
        holder.buffer.clear()
        for batch in later:
            self.apply(slot, batch)
        return Applied.NEED_SNAPSHOT if holder.waiting else Applied.DONE

    # Expected pages

    def expect(self, slot: int, hashes: Sequence[int], now: float) -> None:
        """A prompt was sent to this worker: for the TTL of expectations its pages count as present there."""
        pages = tuple(hashes)
        if not pages or len(pages) > self._max_speculative:
            return
        while self._pending and self._pending_pages + len(pages) > self._max_speculative:
            self._forget_oldest()
        for page in pages:
            key = (slot, page)
            references = self._references.get(key, 0)
            self._references[key] = references + 1
            if not references:
                self._expected[page] = self._expected.get(page, 0) | 1 << slot
        self._pending.append((now + self._expected_ttl_s, slot, pages))
        self._pending_pages += len(pages)

    def expire(self, now: float) -> None:
        """Forget expectations that ran out; all have the same TTL, so they end in order of arrival."""
        while self._pending and self._pending[0][0] <= now:
            self._forget_oldest()

    # Questions

    def match(self, hashes: Sequence[int], slots: int) -> NDArray[np.int64]:
        """Return for each of `slots` slots how many leading pages of `hashes` it holds or will soon hold."""
        matched = np.zeros(slots, dtype=np.int64)
        if not hashes:
            return matched
        memo: dict[int, int] = {}

        def holders(index: int) -> int:
            known = memo.get(index)
            if known is None:
                page = hashes[index]
                known = memo[index] = self._reported.get(page, 0) | self._expected.get(page, 0)
            return known

        # Sets shrink along the chain: where both ends of a stretch have equal holders, nobody left in between.
        last = len(hashes) - 1
        stretches = [(0, last)] if holders(0) else []
        _set(matched, holders(last) & holders(0), last + 1)
        while stretches:
            low, high = stretches.pop()
            left = holders(low) & ~holders(high)
            if not left:
                continue
            if high == low + 1:
                _set(matched, left, high)
                continue
            middle = (low + high) // 2
            stretches.append((low, middle))
            stretches.append((middle, high))
        return matched

    def pages(self, slot: int) -> int:
        """Return the number of pages a worker reported."""
        holder = self._holders.get(slot)
        return len(holder.hashes) if holder is not None else 0

    def is_waiting(self, slot: int) -> bool:
        """True while a worker's pages are not known exactly."""
        holder = self._holders.get(slot)
        return holder is not None and holder.waiting

    def __len__(self) -> int:
        return len(self._reported)

    @property
    def speculative_pages(self) -> int:
        """Expectations now held: never more than the bound."""
        return self._pending_pages

    # Book-keeping

    def _buffer(self, holder: _Holder, batch: KvEventBatch) -> None:
        holder.waiting = True
        if len(holder.buffer) >= MAX_BUFFERED_BATCHES:
            self.counts.overflows += 1
            holder.buffer.clear()
        holder.buffer.append(batch)

    def _take(self, holder: _Holder, slot: int, batch: KvEventBatch) -> None:
        for event in batch.events:
            self._event(holder, slot, event)
        holder.sequence = batch.sequence

    def _event(self, holder: _Holder, slot: int, event: KvEvent) -> None:
        if event.medium != DEVICE:
            return  # lower tiers are not scored yet
        if event.kind == "stored":
            for page in event.hashes:
                if page not in holder.hashes:
                    holder.hashes.add(page)
                    self._reported[page] = self._reported.get(page, 0) | 1 << slot
        elif event.kind == "removed":
            for page in event.hashes:
                if page in holder.hashes:
                    holder.hashes.discard(page)
                    self._clear_bit(self._reported, page, slot)
        elif event.kind == "cleared":
            self._replace(holder, slot, ())

    def _replace(self, holder: _Holder, slot: int, pages: Sequence[int]) -> None:
        new = set(pages)
        for page in holder.hashes - new:
            self._clear_bit(self._reported, page, slot)
        for page in new - holder.hashes:
            self._reported[page] = self._reported.get(page, 0) | 1 << slot
        holder.hashes = new

    def _check_bound(self, holder: _Holder) -> Applied:
        """A worker cannot hold more pages than it has: if it seems to, removals were lost."""
        if len(holder.hashes) <= holder.max_pages:
            return Applied.DONE
        self.counts.overflows += 1
        holder.waiting = True
        return Applied.NEED_SNAPSHOT

    def _forget_oldest(self) -> None:
        _, slot, pages = self._pending.popleft()
        self._unexpect(slot, pages)

    def _unexpect(self, slot: int, pages: tuple[int, ...]) -> None:
        self._pending_pages -= len(pages)
        for page in pages:
            key = (slot, page)
            left = self._references[key] - 1
            if left:
                self._references[key] = left
            else:
                del self._references[key]
                self._clear_bit(self._expected, page, slot)

    @staticmethod
    def _clear_bit(table: dict[int, int], page: int, slot: int) -> None:
        left = table.get(page, 0) & ~(1 << slot)
        if left:
            table[page] = left
        else:
            table.pop(page, None)


def _set(matched: NDArray[np.int64], mask: int, value: int) -> None:
    """matched[slot] = value for every bit of `mask` that is a slot of the array."""
    if not mask:
        return
    size = (mask.bit_length() + 7) // 8
    bits = np.unpackbits(np.frombuffer(mask.to_bytes(size, "little"), dtype=np.uint8), bitorder="little")
    slots = np.flatnonzero(bits)
    matched[slots[slots < len(matched)]] = value
