"""Operations that drive pool, tree and event recorder as an engine would, checked against `CacheOracle` after every one.

No page may ever be handed out that a launched step or an open writer can still touch, the audits must be silent, and
a reader of the KV events must know what is cached.
"""

from dataclasses import dataclass

from core.hashing import event_hash
from core.ids import Incarnation
from tests.property.cache_oracle import (
    FENCED,
    FREE,
    LANDING,
    LOADING,
    PRIVATE,
    TREE,
    UNPROVEN,
    CacheOracle,
    chain,
    int32,
    refused,
)

WEIGHTS = {
    "start": 8,
    "compute": 10,
    "publish": 2,
    "retire": 3,
    "grow": 2,
    "finish": 5,
    "writers_end": 4,
    "commit_landing": 2,
    "abandon_landing": 2,
    "prove": 2,
    "end_loading": 3,
    "evict": 3,
    "flush": 1,
    "lock_after_an_eviction": 2,
    "match": 1,
    "give_everything_back": 1,
    "publish_for_another_owner": 1,
    "illegal_moves": 1,
    "drain": 3,
}


@dataclass(frozen=True)
class Draw:
    """What hypothesis chose for one operation; each uses what it needs."""

    index: int
    count: int
    flag: bool
    items: list


class CacheDriver(CacheOracle):
    """An engine that does everything an engine may do, in any order. Operations that can not apply do nothing."""

    def start(self, draw):
        if len(self.sequences) == 5:
            return
        kind = ("", "", "", "", "landing", "loading")[draw.index % 6]
        target = {"": PRIVATE, "landing": LANDING, "loading": LOADING}[kind]
        sequence = self.begin(draw.items, 9 if draw.flag else draw.count, target)
        if sequence is not None:
            sequence.arriving = kind
            if kind == "landing":
                sequence.open_pages = set(sequence.pages[sequence.locked :])
                self.writers |= sequence.open_pages

    def compute(self, draw):
        sequence = self.choose(draw.index, "")
        if sequence is None:
            return
        if self.launched - self.retired == 2:
            self.retire(draw)
        sequence.computed = min(sequence.computed + 1 + draw.count, len(sequence.pages))
        self.launched += 1
        self.using[self.launched] = set(sequence.pages[: sequence.computed])
        if draw.flag:
            self.publish(draw)

    def retire(self, draw):
        if self.launched == self.retired:
            return
        self.retired += 1
        self.using.pop(self.retired)
        due = [page for page, fence in self.fences.items() if fence <= self.retired]
        assert self.pool.num_retiring(self.retired) == len(due)
        assert self.pool.retire(self.retired) == len(due)
        self.move(due, (FENCED,), FREE)
        for page in due:
            del self.fences[page]

    def publish(self, draw):
        sequence = self.choose(draw.index, "")
        if sequence is None:
            return
        start, end = sequence.locked, sequence.computed
        known = start
        while known < end and sequence.hashes[known] in self.cached:
            known += 1
        hashes, own = sequence.hashes[:end], list(sequence.pages[:end])
        published = self.tree.publish(sequence.id, hashes, int32(own), sequence.receipt)
        with refused():
            self.tree.unlock(sequence.receipt)
        sequence.receipt = published.receipt
        assert published.start == start
        if sequence.generation != self.generation:
            assert published.canonical_pages.tolist() == own[start:]
            assert not len(published.duplicate_pages)
            return
        canonical = [self.cached[h] for h in hashes[start:known]] + own[known:]
        assert published.canonical_pages.tolist() == canonical
        assert published.duplicate_pages.tolist() == own[start:known]
        self.move(own[known:], (PRIVATE,), TREE)
        self.cached.update(zip(hashes[known:], own[known:], strict=True))
        self.locks.update(canonical)
        sequence.pages[start:end] = canonical
        sequence.locked = end
        self.free(published.duplicate_pages.tolist(), sequence.id)

    def grow(self, draw):
        """One more page for each of some sequences, in one call, as a decode step does."""
        growing = [s for s in self.sequences if not s.arriving and len(s.pages) < 8][: 1 + draw.count % 3]
        fresh = self.take_each([sequence.id for sequence in growing])
        for sequence, page in zip(growing, fresh, strict=True) if fresh is not None else ():
            sequence.pages.append(page)
            sequence.hashes += chain(draw.items[:1], sequence.hashes[-1])
            self.parents[sequence.hashes[-1]] = sequence.hashes[-2]

    def finish(self, draw):
        sequence = self.choose(draw.index, "")
        if sequence is None:
            return
        self.sequences.remove(sequence)
        self.unlock(sequence, self.launched if draw.flag else None)
        self.free(sequence.pages[sequence.locked :], sequence.id)

    # Sequences whose pages come from elsewhere.

    def writers_end(self, draw):
        ended = set(sorted(self.writers)[draw.count % 4 :])
        self.writers -= ended
        for sequence in self.sequences:
            sequence.open_pages -= ended

    def commit_landing(self, draw):
        sequence = self.choose(draw.index, "landing")
        if sequence is None:
            return
        self.writers -= sequence.open_pages
        sequence.open_pages.clear()
        arrived = sequence.pages[sequence.locked :]
        self.pool.commit_landing(int32(arrived), sequence.id)
        self.move(arrived, (LANDING,), PRIVATE, sequence.id)
        sequence.arriving = ""
        sequence.computed = len(sequence.pages)

    def abandon_landing(self, draw):
        sequence = self.choose(draw.index, "landing")
        if sequence is None:
            return
        self.sequences.remove(sequence)
        self.unlock(sequence, self.launched)
        arrived, still_open = sequence.pages[sequence.locked :], sorted(sequence.open_pages)
        self.pool.abandon_landing(int32(arrived), int32(still_open))
        self.move(still_open, (LANDING,), UNPROVEN, sequence.id)
        self.move([page for page in arrived if page not in sequence.open_pages], (LANDING,), FREE)

    def prove(self, draw):
        proven = [p for p in range(self.num_pages) if self.state[p] is UNPROVEN and p not in self.writers]
        if not proven:
            return
        chosen = proven[: 1 + draw.index % len(proven)]
        self.pool.prove(int32(chosen))
        self.move(chosen, (UNPROVEN,), FREE)
        with refused():
            self.pool.prove(int32(chosen[:1]))

    def end_loading(self, draw):
        sequence = self.choose(draw.index, "loading")
        if sequence is None:
            return
        loaded = sequence.pages[sequence.locked :]
        if draw.flag:
            self.pool.commit_loading(int32(loaded), sequence.id)
            self.move(loaded, (LOADING,), PRIVATE, sequence.id)
            sequence.arriving = ""
            sequence.computed = len(sequence.pages)
            return
        self.sequences.remove(sequence)
        self.unlock(sequence, None)
        self.pool.abandon_loading(int32(loaded), self.launched)
        self.discard(loaded, self.launched)

    # The tree loses pages.

    def drop_from_tree(self, pages, expected):
        unlocked = self.evictable()
        assert len(pages) == expected == len(set(pages)), "evict returned another number of pages than it promised"
        assert set(pages) <= set(unlocked), "a locked page, or one that the tree does not hold, was evicted"
        self.cached = {h: page for h, page in self.cached.items() if page not in pages}
        self.free(pages)

    def evict_pages(self, count):
        expected = min(count, len(self.evictable()))
        self.drop_from_tree(self.tree.evict(count).tolist(), expected)

    def evict(self, draw):
        self.evict_pages(draw.count)

    def flush(self, draw):
        if draw.index % 3:
            return
        expected = len(self.evictable())
        pages = self.tree.flush().tolist()
        self.cached.clear()
        self.generation += 1
        self.drop_from_tree(pages, expected)

    def lock_after_an_eviction(self, draw):
        hashes = chain(draw.items)
        hit = self.tree.match(hashes)
        self.evict_pages(draw.count)
        if self.cached_length(hashes) < hit.num_device:
            with refused():
                self.tree.lock(hit, hit.num_device)
        else:
            self.tree.unlock(self.tree.lock(hit, hit.num_device), self.launched)
            for page in hit.pages.tolist():
                if not self.locks[page]:
                    self.last_use[page] = self.launched

    def match(self, draw):
        hashes = chain(draw.items)
        assert self.tree.match(hashes).pages.tolist() == [self.cached[h] for h in hashes[: self.cached_length(hashes)]]

    def give_everything_back(self, draw):
        if draw.index % 4:
            return
        draw = Draw(0, 0, flag=False, items=[0])
        self.writers.clear()
        for sequence in self.sequences:
            sequence.open_pages.clear()
        while self.sequences:
            kind = self.sequences[0].arriving
            if kind == "landing":
                self.abandon_landing(draw)
            elif kind == "loading":
                self.end_loading(draw)
            else:
                self.finish(draw)
        while self.launched > self.retired:
            self.retire(draw)
        while UNPROVEN in self.state:
            self.prove(draw)
        self.evict_pages(self.num_pages)
        assert self.pool.num_free == self.num_pages - 1

    # What must be refused, and change nothing.

    def publish_for_another_owner(self, draw):
        sequence = self.choose(draw.index, "")
        if sequence is None or sequence.computed == sequence.locked:
            return
        end = sequence.computed
        with refused():
            self.tree.publish(sequence.id + 1, sequence.hashes[:end], int32(sequence.pages[:end]), sequence.receipt)

    def illegal_moves(self, draw):
        page, twice = draw.index - 2, draw.flag
        state = self.state[page] if 0 <= page < self.num_pages else None
        pages = int32([page, page] if twice else [page])
        if twice or state not in (PRIVATE, TREE):
            with refused():
                self.pool.free(pages, self.launched)
        if twice or state is not LANDING:
            with refused():
                self.pool.commit_landing(pages)
            with refused():
                self.pool.abandon_landing(pages, int32([]))
        if twice or state is not LOADING:
            with refused():
                self.pool.commit_loading(pages)
        if twice or state is not UNPROVEN:
            with refused():
                self.pool.prove(pages)

    # Events.

    def drain(self, draw):
        before = self.recorder.snapshot(Incarnation("i"))
        assert set(before.hashes) == set(self.reader)
        assert before.sequence == self.reader_sequence
        batch = self.recorder.drain()
        if batch is not None:
            assert batch.sequence == self.reader_sequence + 1
            self.reader_sequence = batch.sequence
            for event in batch.events:
                self.apply(event)
        assert self.reader == {event_hash(h): self.parent_name(h) for h in self.cached}
        known = set()
        for name in self.recorder.snapshot(Incarnation("i")).hashes:
            assert self.reader[name] == 0 or self.reader[name] in known, "a snapshot names a child before its parent"
            known.add(name)
        assert known == set(self.reader)

    def parent_name(self, page_hash):
        parent = self.parents[page_hash]
        return 0 if parent is None else event_hash(parent)

    def apply(self, event):
        if event.kind == "cleared":
            self.reader.clear()
            return
        parent = event.parent
        for name in event.hashes:
            if event.kind == "stored":
                assert name not in self.reader and (parent == 0 or parent in self.reader)
                self.reader[name] = parent
                parent = name
            else:
                assert name not in self.reader.values(), "a page was removed before its child"
                del self.reader[name]
