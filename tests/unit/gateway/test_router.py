import random

import pytest

from core.clock import ManualClock
from core.hashing import PageHasher, event_hash
from core.ids import Handle
from core.stream import Started
from core.worker import KvEvent, KvEventBatch, KvSnapshot, Role
from gateway.directory import Directory
from gateway.prefix_index import PrefixIndex
from gateway.resume import Output
from gateway.router import Placed, Router, Work, target_of
from gateway.routing.job import RoutingRules, Shortage
from gateway.routing.picker import Picker
from tests.fakes.cluster import PAGE_TOKENS, SECRET, load, namespace, registration
from tests.fakes.sim_gateway import prompt

TOKENS = tuple(range(10, 10 + 5 * PAGE_TOKENS + 3))


class Rig:
    def __init__(self, **settings):
        self.clock = ManualClock()
        self.directory = Directory(self.clock, **settings)
        self.index = PrefixIndex(expected_ttl_s=5.0)
        self.router = Router(
            directory=self.directory,
            index=self.index,
            secret=SECRET,
            rules=RoutingRules(),
            picker=Picker(random.Random(1)),
            clock=self.clock,
        )

    def add(self, name, **changes):
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        member, _ = self.directory.join(registration(name, role, **changes))
        self.directory.heartbeat(member, load())
        self.index.add(member.slot, member.incarnation, 1000)
        self.index.apply_snapshot(member.slot, KvSnapshot(incarnation=member.incarnation, sequence=0, hashes=()))
        return member

    def place(self, work):
        placed = self.router.place(work)
        assert isinstance(placed, Placed), placed
        return placed


@pytest.fixture
def rig():
    return Rig()


def work(tokens=TOKENS, **changes):
    return Work(prompt(tokens=tokens, **changes), Output())


def hashes(tokens=TOKENS, tenant="", salt="", space=None, size=PAGE_TOKENS):
    hasher = PageHasher(SECRET, space or namespace(), size)
    return hasher.extend(hasher.root(tenant, salt), tokens)


def store(rig, member, pages, sequence=1):
    event = KvEvent(kind="stored", hashes=tuple(event_hash(page) for page in pages))
    rig.index.apply(member.slot, KvEventBatch(sequence=sequence, events=(event,)))


def test_page_hashes_are_those_of_the_workers_namespace_and_the_clients_salt(rig):
    rig.add("p1")
    rig.add("d1")
    assert rig.place(work()).page_hashes == hashes()
    assert rig.place(work(cache_salt="x", tenant="t")).page_hashes == hashes(tenant="t", salt="x")


def test_a_worker_that_reported_the_pages_is_preferred(rig):
    for name in ("p1", "p2", "p3", "d1"):
        rig.add(name)
    holder = rig.directory.find("p2")
    store(rig, holder, hashes())
    placed = [rig.place(work()) for _ in range(5)]
    assert {one.prefill for one in placed} == {holder}
    assert placed[0].choice.matched_prefill == 5 * PAGE_TOKENS
    assert placed[0].uncached_tokens == 3


def test_other_salts_never_match(rig):
    for name in ("p1", "d1"):
        rig.add(name)
    store(rig, rig.directory.find("p1"), hashes())
    assert rig.place(work(cache_salt="mine")).choice.matched_prefill == 0


def test_our_own_dispatch_counts_before_the_worker_reports_it(rig):
    for name in ("p1", "p2", "p3", "d1"):
        rig.add(name)
    first = rig.place(work()).prefill
    assert {rig.place(work()).prefill for _ in range(5)} == {first}
    for _ in range(2):
        rig.clock.advance(5.0)
        for member in rig.directory:
            rig.directory.heartbeat(member, load())
        rig.index.expire(rig.clock.now())
    assert rig.place(work()).choice.matched_prefill == 0


def test_a_resume_extends_the_chain_over_the_output(rig):
    rig.add("p1")
    rig.add("d1")
    asked = work()
    rig.place(asked)
    asked.output.accept(0, list(range(20)), ())
    assert rig.place(asked).page_hashes == hashes((*TOKENS, *range(20)))


def test_groups_of_fingerprints_are_hashed_each_in_its_own_namespace():
    rig = Rig(mixed_fingerprints=True)
    rig.add("p1")
    rig.add("p2", revision="r2", page_tokens=32)
    other = rig.directory.find("p2")
    rig.add("d2", revision="r2", page_tokens=32)
    space = namespace(revision="r2", page_tokens=32)
    store(rig, other, hashes(space=space, size=32))
    placed = rig.place(work())
    assert placed.prefill is other
    assert placed.choice.matched_prefill == 64
    assert placed.page_hashes == hashes(space=space, size=32)


def test_workers_to_avoid_are_taken_when_there_is_no_other(rig):
    rig.add("p1")
    only = rig.add("d1")
    asked = work()
    asked.avoid_decode.add(only)
    assert rig.place(asked).decode is only
    other = rig.add("d2")
    assert {rig.place(asked).decode for _ in range(4)} == {other}


def test_a_worker_that_is_gone_is_no_obstacle_to_its_successor_in_the_slot(rig):
    rig.add("p1")
    old = rig.add("d1")
    asked = work()
    asked.avoid_decode.add(old)
    rig.directory.deregister(old)
    new = rig.add("d9")
    assert new.slot == old.slot
    assert rig.place(asked).decode is new


def test_another_prefill_worker_is_found_or_not(rig):
    one = rig.add("p1")
    decode = rig.add("d1")
    asked = work()
    asked.avoid_prefill.add(one)
    assert rig.router.place_prefill(asked, decode) is None
    two = rig.add("p2")
    assert rig.router.place_prefill(asked, decode) is two
    rig.directory.deregister(decode)
    assert rig.router.place_prefill(asked, decode) is None


def test_nobody_of_that_model_is_a_shortage(rig):
    assert isinstance(rig.router.place(work()), Shortage)


def test_bytes_per_token_are_learned_from_hand_overs(rig):
    rig.add("p1")
    rig.add("d1")
    asked = work()
    placed = rig.place(asked)
    started = Started(handle=Handle(1), num_cached_tokens=0, bytes_pulled=1000 * asked.num_tokens)
    rig.router.handed_over(started, placed, asked.num_tokens, 0.01)
    assert rig.router.placer.link.bytes_per_token == pytest.approx(1000)


def test_a_target_names_address_and_incarnation(rig):
    member = rig.add("p1")
    target = target_of(member)
    assert (target.worker_id, target.address, target.incarnation) == ("p1", "p1:1", "p1-a")
    assert target_of(None) is None
