"""Public reports about routers, each as the behaviour it asks for (numbers of the table in docs/gateway.md)."""

import random
from collections import Counter

import numpy as np
import pytest

from benchmarks.simulator import Scene, Simulation
from benchmarks.traces import Trace, Turn, generated, hashed
from core.clock import ManualClock
from core.errors import NamespaceMismatch
from core.ids import Incarnation
from core.worker import KvEvent, KvEventBatch, Role
from gateway.directory import Directory
from gateway.dispatch import Dispatch
from gateway.placer import HashedPages, Pair, Placer, Query
from gateway.prefix_index import PrefixIndex
from gateway.routing.job import RoutingRules
from gateway.routing.pairs import POLICIES
from gateway.routing.picker import Picker
from tests.fakes.cluster import MODEL, PAGE_TOKENS, load, registration
from tests.fakes.work import calls_of


class Router:
    """The placer over workers p0, p1 ... and one decode worker with room for all."""

    def __init__(self, workers=4, *, clock=None, seed=1, policy="prefix"):
        self.clock = clock or ManualClock()
        self.directory = Directory(self.clock, ttl_s=1e9)
        self.index = PrefixIndex()
        rules, picker = RoutingRules(policy=policy), Picker(random.Random(seed))
        self.placer = Placer(directory=self.directory, index=self.index, rules=rules, picker=picker, clock=self.clock)
        self.prefill = [self.add(f"p{number}", Role.PREFILL) for number in range(workers)]
        self.add("d0", Role.DECODE, num_rows=10**6, num_pages=10**9, max_tokens_total=10**9)
        self.fingerprint = self.prefill[0].registration.fingerprint

    def add(self, name, role, **changes):
        changes = {"max_tokens_total": 10**9} | changes
        member, _ = self.directory.join(registration(name, role, **changes))
        self.directory.heartbeat(member, load(pages_free=10**9))
        self.index.add(member.slot, member.incarnation, 10**6)
        return member

    def send(self, blocks, *, tokens=None):
        query = Query(
            request_id="r",
            model=MODEL,
            num_tokens=tokens or len(blocks) * PAGE_TOKENS,
            max_output=10,
            pages=(HashedPages(self.fingerprint, PAGE_TOKENS, blocks),),
        )
        found = self.placer.place(query)
        assert isinstance(found, Pair), found
        uncached = query.num_tokens - found.choice.matched_prefill
        dispatch = Dispatch(
            self.directory,
            prefill=found.prefill,
            decode=found.decode,
            tokens=max(1, uncached),
            seconds=found.choice.prefill_s,
            context=query.num_tokens,
        )
        return found.prefill, dispatch


def blocks_of(name, count):
    return tuple(hashed(hash((name, number)) & 0xFFFFFFFF) for number in range(count))


@pytest.mark.parametrize("policy", ["prefix", "least_loaded", "overlap_cost", "power_of_two", "cache_aware"])
def test_report_1_equal_prefixes_do_not_pile_up_on_one_worker(policy):
    router, same = Router(4, policy=policy), blocks_of("same", 20)
    sent = [router.send(same + blocks_of(number, 20))[0].worker_id for number in range(200)]
    # A prefix is worth its prefill and no more: the queue spreads it. The peer's rule does so only from 64 on.
    assert max(Counter(sent).values()) <= (0.4 if policy != "cache_aware" else 0.6) * 200


def test_report_2_a_thousand_aborts_at_any_stage_leave_no_load():
    router, rng = Router(4), random.Random(1)
    open_ = []
    for number in range(1000):
        open_.append(router.send(blocks_of(number % 50, 5))[1])
        router.clock.advance(0.01)
        if rng.random() < 0.3:
            rng.choice(open_).computed()
        if rng.random() < 0.7:
            open_.pop(rng.randrange(len(open_))).close()
    for dispatch in open_:
        dispatch.close()
    fleet = router.directory.fleet
    for figures in (fleet.own_tokens, fleet.own_s, fleet.own_prompts, fleet.own_requests, fleet.head_s):
        assert not figures.any()


def test_report_3_counts_belong_to_an_incarnation_and_never_fall_below_zero():
    router = Router(2)
    sent = [router.send(blocks_of(number, 5))[1] for number in range(10)]
    for member in list(router.prefill):
        router.directory.deregister(member)
        router.index.drop(member.slot)
        router.add(member.worker_id, Role.PREFILL, incarnation="again")
    for dispatch in sent:
        dispatch.computed()
        dispatch.close()
    assert not router.directory.fleet.own_tokens.any()
    assert not router.directory.fleet.own_requests.any()


def test_report_5_load_counts_from_the_dispatch_on():
    router = Router(2)
    chosen = {router.send(blocks_of(number, 10))[0].worker_id for number in range(2)}
    assert chosen == {"p0", "p1"}


def test_report_6_cold_prompts_avoid_the_overloaded_worker_with_the_smallest_cache():
    router = Router(3)
    busy = router.prefill[1]
    for number in (0, 2):
        pages = tuple(hashed(10**6 * (number + 1) + page) for page in range(1000))
        router.index.apply(
            router.prefill[number].slot, KvEventBatch(sequence=1, events=(KvEvent(kind="stored", hashes=pages),))
        )
    router.directory.heartbeat(busy, load(waiting_tokens=100_000))
    assert "p1" not in {router.send(blocks_of(number, 30))[0].worker_id for number in range(20)}


def test_report_7_one_hot_worker_does_not_cost_the_others_their_hits():
    quiet = Simulation(generated(200), Scene(workers=4), RoutingRules()).run()

    def slow_down(simulation):
        gateway = simulation.gateways[0]
        gateway.directory.heartbeat(gateway.members[0], load(waiting_tokens=10**7))

    skewed = Simulation(generated(200), Scene(workers=4), RoutingRules(), on_report=slow_down).run()
    assert skewed.hit_share >= 0.8 * quiet.hit_share


def test_report_8_gateways_that_see_the_same_do_not_choose_the_same():
    clock = ManualClock()
    gateways = [Router(8, clock=clock, seed=seed) for seed in range(4)]
    chosen = Counter()
    for number in range(400):
        chosen[gateways[number % 4].send(blocks_of(number, 8))[0].worker_id] += 1
        clock.advance(1 / 400)
    assert max(chosen.values()) / (400 / 8) <= 1.5


def test_report_9_unique_prompts_use_every_worker_alike():
    router = Router(5)
    chosen = Counter(router.send(blocks_of(number, 10))[0].worker_id for number in range(500))
    assert all(0.15 <= count / 500 <= 0.25 for count in chosen.values()) and len(chosen) == 5


def test_report_10_another_page_size_or_tokenizer_is_refused_with_a_reason():
    directory = Directory(ManualClock())
    directory.join(registration("p0", Role.PREFILL))
    with pytest.raises(NamespaceMismatch, match="page size"):
        directory.join(registration("p1", Role.PREFILL, page_tokens=2 * PAGE_TOKENS))


@pytest.mark.parametrize("reports", [True, False], ids=["events", "without events"])
def test_reports_11_and_12_the_index_stays_at_its_bound(reports):
    """An hour's worth of unique chains, compressed: what workers evicted costs nothing any more."""
    index, sizes, sequence = PrefixIndex(), [], 0
    index.add(0, Incarnation("a"), 2_000)
    rng, held = random.Random(1), []
    for number in range(600):
        chain = tuple(rng.getrandbits(64) - 2**63 for _ in range(50))
        index.expect(0, chain, float(number))
        index.expire(float(number))
        if reports:
            held.append(chain)
            gone = held.pop(0)[::-1] if len(held) > 40 else ()
            sequence += 1
            events = (KvEvent(kind="stored", hashes=chain), KvEvent(kind="removed", hashes=gone))
            index.apply(0, KvEventBatch(sequence=sequence, events=events))
        sizes.append(index.nbytes)
        assert index.pages(0) <= 2_000
    assert index.pages(0) == 2_000
    assert max(sizes[300:]) <= 1.05 * max(sizes[100:300])


def test_report_14_a_page_of_a_long_follow_up_costs_two_moves_in_a_list():
    """Its milliseconds are in ``benchmarks/route_scale.py``; here: no Python call for a page, two C calls."""
    short, long = (Router(8) for _ in range(2))
    pages = 65_536 // PAGE_TOKENS
    costs = []
    for router, count in ((short, pages // 8), (long, pages)):
        history = blocks_of("long", count)
        router.send(history[:-40])
        router.send(history)
        costs.append(calls_of(lambda router=router, history=history: router.send(history)))
    assert costs[0] < 2 * (pages // 8) + 800, costs
    assert costs[1] <= costs[0] + 2 * (pages - pages // 8) + 50, costs


def test_hot_prefixes_are_replicated_by_their_queue():
    """One system prompt of 8,000 tokens, many short questions: every worker comes to hold it, none computes it twice."""
    system, at, turns = tuple(map(hashed, range(16))), 0.0, []
    rng = random.Random(1)
    for number in range(400):
        at += rng.expovariate(8.0)
        turns.append(Turn(number, at, 17 * 512, 50, (*system, hashed(1000 + number))))
    outcome = Simulation(Trace("hot", tuple(turns)), Scene(workers=8, lag_s=2.0), RoutingRules()).run()
    computed = (1 - outcome.hit_share) * 17 * 400
    assert computed <= 400 + 8 * 16 * 1.25
    assert float(np.percentile(outcome.ttft, 99)) < 2.0


def test_every_policy_serves_the_whole_trace():
    for policy in POLICIES:
        outcome = Simulation(generated(60), Scene(workers=3), RoutingRules(policy=policy)).run()
        assert len(outcome.ttft) == 60
