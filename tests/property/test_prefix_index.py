"""The index against a plain model: per worker a set of pages, events lost, repeated, reordered, restarted."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import Incarnation
from core.worker import KvEvent, KvEventBatch, KvSnapshot
from gateway.page_table import BULK, PageTable
from gateway.prefix_index import Applied, PrefixIndex

WORKERS = 3
ROOTS = 2
DEPTH = 5
FANOUT = 2


def chain_of(path):
    """Event hashes along a path of a small tree of prompts."""
    hashes, node = [], 0
    for step in path:
        node = node * 7 + step + 1
        hashes.append(node)
    return hashes


class ModelWorker:
    """What a worker really holds, and the batches it sent of that."""

    def __init__(self):
        self.generation = 0
        self.restart()

    def restart(self):
        self.generation += 1
        self.pages = {}
        self.sequence = 0
        self.sent = []

    @property
    def incarnation(self):
        return Incarnation(f"i{self.generation}")

    def emit(self, *events):
        self.sequence += 1
        batch = KvEventBatch(sequence=self.sequence, events=events)
        self.sent.append(batch)
        return batch

    def store(self, chain):
        parent, new = 0, []
        for page in chain:
            if page not in self.pages:
                self.pages[page] = parent
                new.append(page)
            parent = page
        return self.emit(KvEvent(kind="stored", hashes=tuple(new)))

    def evict_leaf(self, rng):
        inner = set(self.pages.values())
        leaves = sorted(page for page in self.pages if page not in inner)
        if not leaves:
            return self.emit()
        leaf = rng.choice(leaves)
        del self.pages[leaf]
        return self.emit(KvEvent(kind="removed", hashes=(leaf,)))

    def clear(self):
        self.pages = {}
        return self.emit(KvEvent(kind="cleared"))

    def snapshot(self):
        return KvSnapshot(incarnation=self.incarnation, sequence=self.sequence, hashes=tuple(self.pages))


def leading(pages, chain):
    count = 0
    for page in chain:
        if page not in pages:
            break
        count += 1
    return count


paths = st.lists(st.integers(0, FANOUT - 1), min_size=1, max_size=DEPTH)
steps = st.lists(
    st.tuples(
        st.integers(0, WORKERS - 1),
        st.sampled_from(["store", "store", "store", "evict", "evict", "clear", "restart", "snapshot"]),
        st.sampled_from(["deliver", "deliver", "deliver", "lose", "twice", "late", "swap"]),
        paths,
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps, st.integers(0, 2**16))
def test_after_healing_every_match_equals_the_model(script, seed):
    rng = random.Random(seed)
    index, workers = PrefixIndex(), [ModelWorker() for _ in range(WORKERS)]
    late = {slot: [] for slot in range(WORKERS)}
    for slot, worker in enumerate(workers):
        index.add(slot, worker.incarnation, 1000)
    for slot, action, delivery, path in script:
        worker = workers[slot]
        if action == "restart":
            worker.restart()
            index.add(slot, worker.incarnation, 1000)
            late[slot] = []
            continue
        if action == "snapshot":
            index.apply_snapshot(slot, worker.snapshot())
            continue
        if action == "store":
            batch = worker.store(chain_of([ROOTS, *path]))
        else:
            batch = worker.evict_leaf(rng) if action == "evict" else worker.clear()
        if delivery == "late":
            late[slot].append(batch)
            continue
        if delivery == "lose":
            continue
        index.apply(slot, batch)
        if delivery == "twice":
            assert index.apply(slot, batch) in (Applied.DUPLICATE, Applied.NEED_SNAPSHOT)
        if delivery == "swap" and late[slot]:
            index.apply(slot, late[slot].pop())
    for slot, worker in enumerate(workers):
        while index.is_waiting(slot) or index._holders[slot].sequence != worker.sequence:
            assert index.apply_snapshot(slot, worker.snapshot()) is not Applied.NEED_SNAPSHOT
        assert index.pages(slot) == len(worker.pages)
    for first in range(FANOUT):
        for second in range(FANOUT):
            chain = chain_of([ROOTS, first, second, first, second])
            expected = [leading(worker.pages, chain) for worker in workers]
            assert index.match(chain, WORKERS).tolist() == expected
    held = set().union(*(worker.pages for worker in workers))
    assert len(index) == len(held)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps)
def test_without_losses_every_batch_keeps_the_index_exact(script):
    rng = random.Random(7)
    index, workers = PrefixIndex(), [ModelWorker() for _ in range(WORKERS)]
    for slot, worker in enumerate(workers):
        index.add(slot, worker.incarnation, 1000)
    for slot, action, _, path in script:
        worker, chain = workers[slot], chain_of([ROOTS, *path])
        if action == "restart":
            worker.restart()
            index.add(slot, worker.incarnation, 1000)
        elif action == "evict":
            assert index.apply(slot, worker.evict_leaf(rng)) is Applied.DONE
        elif action == "clear":
            assert index.apply(slot, worker.clear()) is Applied.DONE
        else:
            assert index.apply(slot, worker.store(chain)) is Applied.DONE
        expected = [leading(other.pages, chain) for other in workers]
        assert index.match(chain, WORKERS).tolist() == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), paths, st.floats(0, 4)), max_size=30))
def test_an_expectation_lives_for_one_to_two_half_lives(script):
    index, now, model = PrefixIndex(expected_ttl_s=10.0), 0.0, []
    for slot in range(WORKERS):
        index.add(slot, Incarnation("a"), 1000)
        index.apply_snapshot(slot, KvSnapshot(incarnation=Incarnation("a"), sequence=0, hashes=()))
    for slot, path, elapsed in script:
        now += elapsed
        index.expire(now)
        chain = chain_of([ROOTS, *path])
        index.expect(slot, chain, now)
        model.append((now, slot, chain))
        surely, possibly = (
            [
                {page for then, owner, pages in model if owner == s and now - then < age for page in pages}
                for s in range(WORKERS)
            ]
            for age in (5.0, 10.0 + 4.0)
        )
        for worker, held in enumerate(index.match(chain, WORKERS).tolist()):
            assert leading(surely[worker], chain) <= held <= leading(possibly[worker], chain)
    # Two half lives and a bit: `now` is a sum of floats, and exactly half a life may be one rounding short of it.
    index.expire(now + 5.5)
    index.expire(now + 11.0)
    assert index.speculative_pages == 0


pages = st.integers(-300, 300)
operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "discard", "discard", "drop"]),
        st.integers(0, 70),
        st.one_of(st.lists(pages, max_size=8), st.lists(pages, min_size=BULK, max_size=4 * BULK)),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(operations)
def test_the_table_is_a_map_from_pages_to_sets(script):
    table, model = PageTable(), {}
    for operation, slot, given_pages in script:
        if operation == "add":
            table.add(slot, given_pages)
            for page in given_pages:
                model.setdefault(page, set()).add(slot)
        elif operation == "discard":
            table.discard(slot, given_pages)
            for page in given_pages:
                model.get(page, set()).discard(slot)
        else:
            table.drop(slot)
            for held in model.values():
                held.discard(slot)
    assert {page: table.get(page) for page in model} == {
        page: sum(1 << slot for slot in held) for page, held in model.items()
    }
    assert len(table) == sum(1 for held in model.values() if held)
    for slot in range(71):
        assert table.pages(slot) == sum(slot in held for held in model.values())
    # Sets are interned and forgotten with their last page.
    assert len(table._numbers) == len({frozenset(held) for held in model.values() if held})
    assert sum(table._members) == len(table)


def test_a_page_costs_less_than_64_bytes_and_what_was_evicted_costs_nothing():
    rng = random.Random(5)
    index = PrefixIndex()
    for slot in range(8):
        index.add(slot, Incarnation("a"), 10_000)
    live, sequence, largest = [[] for _ in range(8)], [0] * 8, 0
    for _ in range(400):
        slot = rng.randrange(8)
        new = [rng.getrandbits(64) - 2**63 for _ in range(500)]
        old, live[slot] = live[slot][:-4_500], live[slot][-4_500:] + new
        events = (KvEvent(kind="stored", hashes=tuple(new)), KvEvent(kind="removed", hashes=tuple(old)))
        sequence[slot] += 1
        assert index.apply(slot, KvEventBatch(sequence=sequence[slot], events=events)) is Applied.DONE
        largest = max(largest, index.nbytes / max(len(index), 2_000))
    assert len(index) == sum(map(len, live))
    assert largest < 64
