"""Times the cache's operations against the budgets of the design: pool, tree and event recorder, no tensors.

Page of 256 tokens; a 100k-token chain is 390 pages. Each figure is per call in microseconds: best, median and 99th
percentile over `--repeats` calls on a tree that holds many other chains. `--record` keeps the figures.
Knows nothing of an engine.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

from benchmarks.record import write_record
from core.ids import PageHash
from engine.cache.events import EventRecorder
from engine.cache.page_pool import PagePool
from engine.cache.page_state import Pages
from engine.cache.prefix_tree import PrefixTree
from engine.cache.receipt import Published, Receipt
from engine.events import SeqId

PAGE_TOKENS = 256
LONG_PAGES = 100_000 // PAGE_TOKENS
CHUNK_PAGES = 8192 // PAGE_TOKENS
SHARED_PAGES = 16
BUDGET_US = {
    "match 100k tokens, all cached": 60.0,
    "match 100k tokens, none cached": 60.0,
    "lock 100k tokens": 40.0,
    "unlock 100k tokens": 40.0,
    "publish a chunk of 8k tokens after 100k": 80.0,
    "evict 64 pages": 150.0,
}

Given = TypeVar("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    best_us: float
    median_us: float
    p99_us: float


class World:
    """A pool and a tree with `num_chains` chains that share a system prompt and then branch."""

    def __init__(self, num_pages: int, num_chains: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.recorder = EventRecorder()
        self.pool = PagePool(num_pages, PAGE_TOKENS)
        self.tree = PrefixTree(self.pool, recorder=self.recorder)
        self.step = 0
        self.next_owner = 0
        self.shared = self.chain(SHARED_PAGES)
        for _ in range(num_chains):
            self.store(self.shared + self.chain(48))

    def chain(self, pages: int) -> tuple[PageHash, ...]:
        """Return fresh page hashes; the tree never looks at what a hash was made of."""
        return tuple(PageHash(self.random.randbytes(32)) for _ in range(pages))

    def owner(self) -> SeqId:
        """Return a fresh sequence id."""
        self.next_owner += 1
        return SeqId(self.next_owner)

    def allocate(self, count: int, owner: SeqId) -> Pages:
        """Allocate, evicting as needed; nothing is in flight."""
        while True:
            pages = self.pool.allocate(count, owner)
            if pages is not None:
                return pages
            self.pool.free(self.tree.evict(max(count, 64)), fence=0)

    def store(self, hashes: Sequence[PageHash], chunk: int = 1 << 30) -> None:
        """Run one sequence through: match, allocate, publish chunk by chunk, unlock."""
        owner = self.owner()
        hit = self.tree.match(hashes)
        held = hit.longest_on_device(len(hashes))
        receipt = self.tree.lock(hit, held)
        pages = np.concatenate((hit.pages[:held], self.allocate(len(hashes) - held, owner)))
        for end in (*range(held + chunk, len(hashes), chunk), len(hashes)):
            receipt = self.tree.publish(owner, hashes[:end], pages[:end], receipt).receipt
        self.tree.unlock(receipt)
        self.recorder.drain()

    def retire(self) -> None:
        """End the step in flight and begin the next."""
        self.pool.retire(self.step)
        self.step += 1


def timed(
    repeats: int, before: Callable[[], Given], call: Callable[[Given], Result], after: Callable[[Result], object]
) -> Timing:
    """Time `call` alone, on what `before` made; `after` restores the state."""
    samples = np.empty(repeats)
    gc.collect()
    gc.disable()
    for index in range(repeats):
        given = before()
        begin = time.perf_counter()
        result = call(given)
        samples[index] = time.perf_counter() - begin
        after(result)
    gc.enable()
    best, median, p99 = (round(float(value), 1) for value in np.percentile(samples * 1e6, (0, 50, 99)))
    return Timing(best, median, p99)


def measure_tree(world: World, repeats: int) -> dict[str, Timing]:
    """Time match, lock, unlock, publish and evict."""
    tree, pool = world.tree, world.pool
    deep = world.shared + world.chain(LONG_PAGES - SHARED_PAGES)
    world.store(deep, CHUNK_PAGES)
    cold = world.chain(LONG_PAGES)

    def lock_deep() -> Receipt:
        return tree.lock(tree.match(deep), LONG_PAGES)

    def before_publish() -> tuple[SeqId, tuple[PageHash, ...], Pages, Receipt]:
        owner = world.owner()
        hit = tree.match(deep)
        receipt = lock_deep()
        pages = np.concatenate((hit.pages, world.allocate(CHUNK_PAGES, owner)))
        return owner, deep + world.chain(CHUNK_PAGES), pages, receipt

    def after_publish(published: Published) -> None:
        tree.unlock(published.receipt, 0)
        pool.free(published.duplicate_pages, 0)
        pool.free(tree.evict(CHUNK_PAGES), 0)
        world.recorder.drain()

    def before_evict() -> int:
        world.store(world.shared + world.chain(64))
        return 64

    return {
        "match 100k tokens, all cached": timed(repeats, lambda: deep, tree.match, id),
        "match 100k tokens, none cached": timed(repeats, lambda: cold, tree.match, id),
        "lock 100k tokens": timed(
            repeats, lambda: tree.match(deep), lambda hit: tree.lock(hit, LONG_PAGES), tree.unlock
        ),
        "unlock 100k tokens": timed(repeats, lock_deep, lambda receipt: tree.unlock(receipt, 0), id),
        "publish a chunk of 8k tokens after 100k": timed(
            repeats, before_publish, lambda given: tree.publish(*given), after_publish
        ),
        "evict 64 pages": timed(repeats, before_evict, tree.evict, lambda pages: pool.free(pages, 0)),
    }


def measure_pool(world: World, repeats: int) -> dict[str, Timing]:
    """Time the pool and the recorder, which have no budget of their own."""
    pool, recorder = world.pool, world.recorder
    pool.free(world.tree.evict(256), 0)
    cold = world.chain(CHUNK_PAGES)
    nobody = world.owner()

    def allocate(count: int) -> Pages:
        pages = pool.allocate(count, nobody)
        if pages is None:
            raise RuntimeError("the benchmark's pool is too small")
        return pages

    def free(pages: Pages) -> None:
        pool.free(pages, 0)

    return {
        "allocate 1 page": timed(repeats, lambda: 1, allocate, free),
        "allocate 32 pages": timed(repeats, lambda: 32, allocate, free),
        "free 32 pages behind a fence": timed(
            repeats, lambda: allocate(32), lambda pages: pool.free(pages, world.step), lambda _: world.retire()
        ),
        "drain the events of a chunk of 8k tokens": timed(
            repeats, lambda: recorder.stored(cold, None), lambda _: recorder.drain(), id
        ),
    }


def main() -> None:
    """Parse arguments, measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--pages", type=int, default=16_384, help="size of the pool")
    parser.add_argument("--chains", type=int, default=300, help="chains in the tree beforehand")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/cache_ops.json")
    parser.add_argument("--note", default="", help="what else bears on the figures")
    options = parser.parse_args()
    world = World(options.pages, options.chains, options.seed)
    found = measure_tree(world, options.repeats) | measure_pool(world, options.repeats)
    print(f"{'operation':44}{'best':>9}{'median':>9}{'p99':>9}{'budget':>9}  us per call")
    for name, timing in found.items():
        budget = f"{BUDGET_US[name]:9.0f}" if name in BUDGET_US else f"{'':9}"
        print(f"{name:44}{timing.best_us:9.1f}{timing.median_us:9.1f}{timing.p99_us:9.1f}{budget}")
    if options.record:
        rows = [{"operation": n, **asdict(t), "budget_us": BUDGET_US.get(n)} for n, t in found.items()]
        write_record(
            "cache_ops", {"page_tokens": PAGE_TOKENS, "numpy": np.__version__, "operations": rows}, note=options.note
        )


if __name__ == "__main__":
    main()
