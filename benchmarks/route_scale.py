"""What routing costs: a placement among up to 4,000 workers, a 64k-token follow-up, events, and bytes of the index.

    python -m benchmarks.route_scale

CPU time of this process, best of the repeats; beside it a dict of page -> set of workers as the simple version.
"""

import random
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from benchmarks.record import write_record
from core.clock import ManualClock
from core.hashing import Namespace, PageHasher, event_hash, fingerprint
from core.ids import Incarnation, WorkerId
from core.lifecycle import State
from core.worker import KvEvent, KvEventBatch, KvSnapshot, Load, Registration, Role
from gateway.directory import Directory
from gateway.page_table import PageTable
from gateway.placer import HashedPages, Placer, Query
from gateway.prefix_index import PrefixIndex
from gateway.routing.job import RoutingRules
from gateway.routing.pairs import choose_pair
from gateway.routing.picker import Picker

PAGE = 64
NAMESPACE = Namespace(model="m", revision="r", tokenizer="t", kv_dtype="bf16", page_tokens=PAGE).encode()


def best(act: Callable[[], object], repeats: int = 30) -> float:
    """Return the least CPU microseconds of one call."""
    least = float("inf")
    for _ in range(repeats):
        started = time.process_time_ns()
        act()
        least = min(least, time.process_time_ns() - started)
    return round(least / 1000, 1)


class Fleet:
    """A directory of so many prefill and decode workers, busy at random, and a placer over it."""

    def __init__(self, workers: int, policy: str = "prefix") -> None:
        self.rng = random.Random(1)
        self.clock = ManualClock()
        self.directory = Directory(self.clock, ttl_s=1e9, max_workers=2 * workers)
        self.index = PrefixIndex()
        self.rules = msgspec.convert({"policy": policy}, RoutingRules)
        picker = Picker(random.Random(2))
        self.picker = picker
        self.placer = Placer(
            directory=self.directory, index=self.index, rules=self.rules, picker=picker, clock=self.clock
        )
        for number in range(workers):
            for role in (Role.PREFILL, Role.DECODE):
                self._join(f"{role.value}-{number}", role)

    def _join(self, name: str, role: Role) -> None:
        told = Registration(
            worker_id=WorkerId(name),
            incarnation=Incarnation(name),
            role=role,
            model="m",
            address=name,
            http_address=name,
            namespace=NAMESPACE,
            fingerprint=fingerprint(NAMESPACE),
            secret_check=b"",
            page_tokens=PAGE,
            num_pages=100_000,
            num_rows=256,
            max_tokens_total=1 << 20,
            vocab_size=1,
            eos_token_ids=(),
        )
        member, _ = self.directory.join(told)
        load = Load(
            state=State.READY,
            pages_total=100_000,
            pages_free=90_000,
            pages_evictable=0,
            rows_total=256,
            rows_used=0,
            waiting_requests=0,
            waiting_tokens=self.rng.randrange(20_000),
            running_requests=self.rng.randrange(200),
            step_ms=20.0,
        )
        self.directory.heartbeat(member, load)
        self.index.add(member.slot, told.incarnation, told.num_pages)
        empty = KvSnapshot(incarnation=told.incarnation, sequence=0, hashes=())
        self.index.apply_snapshot(member.slot, empty)

    def query(self, events: tuple[int, ...]) -> Query:
        """Return a request of whole pages."""
        pages = (HashedPages(fingerprint(NAMESPACE), PAGE, events),)
        return Query(request_id="r", model="m", num_tokens=len(events) * PAGE + 1, max_output=100, pages=pages)


def hashes(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.getrandbits(64) - 2**63 for _ in range(count))


def placements() -> list[Mapping[str, object]]:
    """Pure choice, and everything behind the hashes (index, choice, expectations, explanation)."""
    rows: list[Mapping[str, object]] = []
    for workers in (8, 64, 500, 1000, 2000):
        fleet = Fleet(workers)
        chain = hashes(fleet.rng, 32)
        for slot in fleet.rng.sample(range(2 * workers), min(workers, 20)):
            fleet.index.apply(slot, KvEventBatch(sequence=1, events=(KvEvent(kind="stored", hashes=chain[:20]),)))
        query = fleet.query(chain)
        matched = fleet.index.match(chain, fleet.directory.fleet.capacity) * PAGE
        job = fleet.placer.job(query, matched, avoid=False)
        row: dict[str, object] = {"prefill_workers": workers, "decode_workers": workers}
        row["match_us"] = best(lambda f=fleet, c=chain: f.index.match(c, f.directory.fleet.capacity))
        row["choose_us"] = best(lambda f=fleet, j=job: choose_pair(f.directory.fleet, j, f.rules, f.picker, now=0.0))
        row["place_us"] = best(lambda f=fleet, q=query: f.placer.place(q))
        print(row, flush=True)
        rows.append(row)
    return rows


def follow_up() -> Mapping[str, object]:
    """A turn of 64k tokens of which the last 1,900 are new: chain, index, choice. Tokenizing is measured elsewhere."""
    rng, fleet = random.Random(3), Fleet(16)
    tokens = tuple(rng.randrange(100_000) for _ in range(65_536))
    hasher = PageHasher(b"s", NAMESPACE, PAGE)

    def chain(given: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(event_hash, hasher.extend(hasher.root(), given)))

    events = chain(tokens)
    old = events[: (65_536 - 1_900) // PAGE]
    fleet.index.apply(3, KvEventBatch(sequence=1, events=(KvEvent(kind="stored", hashes=old),)))
    query = fleet.query(events)
    return {
        "hash_1024_pages_us": best(lambda: chain(tokens), 10),
        "match_1024_pages_us": best(lambda: fleet.index.match(events, fleet.directory.fleet.capacity)),
        "place_1024_pages_us": best(lambda: fleet.placer.place(query)),
        "goal_us": 5000,
    }


def memory() -> list[Mapping[str, object]]:
    """Bytes a page, by pages and by workers that share them."""
    rows: list[Mapping[str, object]] = []
    for pages, sharing in ((100_000, 1), (1_000_000, 1), (1_000_000, 4), (100_000, 64)):
        rng, table = random.Random(4), PageTable()
        chains = [hashes(rng, 50) for _ in range(pages // 50)]
        simple: dict[int, set[int]] = {}
        started = time.process_time()
        for number, chain in enumerate(chains):
            for copy in range(sharing):
                table.add((number * 7 + copy) % 256, chain)
        seconds = time.process_time() - started
        if pages <= 100_000:
            for number, chain in enumerate(chains):
                for page in chain:
                    simple[page] = {(number * 7 + copy) % 256 for copy in range(sharing)}
        rows.append(
            {
                "pages": pages,
                "workers_a_page": sharing,
                "bytes_a_page": round(table.nbytes / pages, 1),
                "goal_bytes": 64,
                "add_us_a_page": round(1e6 * seconds / pages / sharing, 2),
                "dict_of_sets_bytes_a_page": _dict_bytes(simple) if simple else None,
            }
        )
        print(rows[-1], flush=True)
    return rows


def _dict_bytes(simple: Mapping[int, set[int]]) -> float:
    """Bytes of the dict, its keys and its sets (small numbers are shared)."""
    sizes = simple.__sizeof__() + sum(page.__sizeof__() + held.__sizeof__() for page, held in simple.items())
    return round(sizes / len(simple), 1)


def hour() -> Mapping[str, object]:
    """An hour of unique chains through one index, compressed: its bytes at each tenth."""
    rng, index, sequence = random.Random(5), PrefixIndex(), [0] * 16
    held: list[list[tuple[int, ...]]] = [[] for _ in range(16)]
    for slot in range(16):
        index.add(slot, Incarnation("a"), 4_000)
        index.apply_snapshot(slot, KvSnapshot(incarnation=Incarnation("a"), sequence=0, hashes=()))
    sizes: list[int] = []
    for number in range(36_000):  # ten a second
        now, slot = number / 10, rng.randrange(16)
        chain = hashes(rng, 24)
        index.expire(now)
        index.expect(slot, chain, now)
        held[slot].append(chain)
        gone = held[slot].pop(0)[::-1] if len(held[slot]) > 160 else ()
        sequence[slot] += 1
        events = (KvEvent(kind="stored", hashes=chain), KvEvent(kind="removed", hashes=gone))
        index.apply(slot, KvEventBatch(sequence=sequence[slot], events=events))
        if number % 3_600 == 3_599:
            sizes.append(index.nbytes)
    pages = sum(len(chain) for chains in held for chain in chains)
    return {
        "requests": 36_000,
        "pages_stored": 36_000 * 24,
        "pages_held": pages,
        "pages_in_index": len(index),
        "bytes_by_tenth": sizes,
        "bytes_a_page": round(float(np.max(sizes)) / pages, 1),
    }


def main() -> None:
    result = {"placements": placements(), "follow_up": follow_up(), "memory": memory(), "hour": hour()}
    print(result["follow_up"], result["hour"])
    write_record("route_scale", result, note="CPU microseconds, best of the repeats; machine shared with other work")


if __name__ == "__main__":
    main()
