import random
from collections import Counter

import msgspec
import numpy as np
import pytest

from core.clock import ManualClock
from core.lifecycle import State
from core.worker import Role
from gateway.directory import Directory
from gateway.routing.calibration import LinkCosts
from gateway.routing.job import NONE, Choice, Job, RoutingRules, Shortage
from gateway.routing.pairs import POLICIES, choose_pair, choose_prefill
from gateway.routing.picker import Picker
from tests.fakes.cluster import MODEL, load, registration
from tests.fakes.work import calls_of

RULES = RoutingRules(prefill_tokens_per_s=1000.0)


class Cluster:
    """A directory with named workers, and questions about it."""

    def __init__(self, **settings):
        self.clock = ManualClock()
        self.directory = Directory(self.clock, **settings)
        self.picker = Picker(random.Random(1))
        self.held = {}

    def add(self, worker_id, role=None, report=None, **changes):
        role = role or (Role.PREFILL if worker_id.startswith("p") else Role.DECODE)
        member, _ = self.directory.join(registration(worker_id, role, **changes))
        self.directory.heartbeat(member, report or load())
        return member

    def job(self, num_tokens=160, **changes):
        matched = np.zeros(self.directory.fleet.capacity, dtype=np.int64)
        for worker_id, tokens in self.held.items():
            matched[self.directory.find(worker_id).slot] = tokens
        values = {"model": self.directory.names.models.find(MODEL), "num_tokens": num_tokens, "max_output": 32}
        return Job(**(values | {"matched": matched} | changes))

    def place(self, rules=RULES, **changes):
        return choose_pair(self.directory.fleet, self.job(**changes), rules, self.picker, now=self.clock.now())

    def names(self, rules=RULES, **changes):
        choice = self.place(rules, **changes)
        assert isinstance(choice, Choice), choice
        prefill = None if choice.prefill == NONE else self.directory.at(choice.prefill).worker_id
        return prefill, self.directory.at(choice.decode).worker_id


def test_the_only_pair_is_chosen_by_every_policy():
    for policy in POLICIES:
        cluster = Cluster()
        cluster.add("p1")
        cluster.add("d1")
        assert cluster.names(msgspec.structs.replace(RULES, policy=policy)) == ("p1", "d1")


def test_an_idle_fleet_is_used_evenly():
    for policy in set(POLICIES) - {"consistent_hash"}:
        cluster = Cluster()
        for name in ("p1", "p2", "d1", "d2"):
            cluster.add(name)
        rules = msgspec.structs.replace(RULES, policy=policy)
        pairs = Counter(cluster.names(rules) for _ in range(200))
        assert len(pairs) == 4
        assert max(pairs.values()) < 80


def test_a_prompt_goes_where_its_prefix_is():
    cluster = Cluster()
    for name in ("p1", "p2", "p3", "d1"):
        cluster.add(name)
    cluster.held = {"p2": 144}
    assert {cluster.names()[0] for _ in range(10)} == {"p2"}


def test_a_long_queue_outweighs_a_short_prefix():
    cluster = Cluster()
    cluster.add("p1", report=load(waiting_tokens=5000))
    cluster.add("p2")
    cluster.add("d1")
    cluster.held = {"p1": 64}
    assert cluster.names()[0] == "p2"


def test_least_loaded_ignores_prefixes():
    cluster = Cluster()
    cluster.add("p1", report=load(waiting_tokens=50))
    cluster.add("p2")
    cluster.add("d1")
    cluster.held = {"p1": 144}
    rules = msgspec.structs.replace(RULES, policy="least_loaded")
    assert cluster.names(rules)[0] == "p2"


def test_queues_are_compared_in_seconds_not_tokens():
    cluster = Cluster()
    cluster.add("p1", report=load(waiting_tokens=4000, prefill_tokens_per_s=10_000))
    cluster.add("p2", report=load(waiting_tokens=1000, prefill_tokens_per_s=1_000))
    cluster.add("d1")
    assert cluster.names()[0] == "p1"


def test_new_chains_avoid_the_worker_with_long_term_load():
    cluster = Cluster()
    one = cluster.add("p1")
    cluster.add("p2")
    cluster.add("d1")
    cluster.directory.fleet.recent_s[one.slot] = 50.0
    assert {cluster.names(continuing=0.9)[0] for _ in range(10)} == {"p2"}
    assert {cluster.names(continuing=0.0)[0] for _ in range(10)} == {"p1", "p2"}


def test_the_emptier_decode_worker_wins():
    cluster = Cluster()
    cluster.add("p1")
    cluster.add("d1", report=load(running_requests=6, rows_used=6))
    cluster.add("d2", report=load(running_requests=1, rows_used=1))
    assert {cluster.names()[1] for _ in range(5)} == {"d2"}


def test_a_decode_worker_without_free_pages_is_avoided():
    cluster = Cluster()
    cluster.add("p1")
    cluster.add("d1", report=load(pages_free=0))
    cluster.add("d2", report=load(running_requests=1))
    assert cluster.names()[1] == "d2"


def test_moving_costs_count_once_bytes_are_known():
    cluster = Cluster()
    cluster.add("p1")
    cluster.add("d1", report=load(running_requests=2))
    cluster.add("d2")
    cluster.held = {"d1": 144}
    assert cluster.names()[1] == "d2"
    assert cluster.names(link=LinkCosts(bytes_per_token=10_000_000.0))[1] == "d1"


def test_pairs_of_one_domain_are_preferred():
    cluster = Cluster()
    cluster.add("p1", domain="a")
    cluster.add("p2", domain="b")
    cluster.add("d1", domain="b")
    assert {cluster.names(link=LinkCosts(bytes_per_token=1_000_000.0))[0] for _ in range(5)} == {"p2"}


def test_fingerprints_never_mix_in_a_pair():
    cluster = Cluster(mixed_fingerprints=True)
    cluster.add("p1", revision="old", report=load(waiting_tokens=100_000))
    cluster.add("p2", revision="new")
    cluster.add("d1", revision="old")
    assert cluster.names() == ("p1", "d1")


def test_a_common_transport_is_required():
    cluster = Cluster()
    cluster.add("p1", transports=("shm",))
    cluster.add("p2", transports=("tcp",))
    cluster.add("d1", transports=("tcp",))
    assert {cluster.names()[0] for _ in range(5)} == {"p2"}


@pytest.mark.parametrize("told", [(), ("auto",)])
def test_a_worker_that_does_not_tell_its_transports_pairs_with_all(told):
    cluster = Cluster()
    cluster.add("p1", transports=("shm",))
    cluster.add("d1", transports=told)
    assert cluster.names() == ("p1", "d1")


def test_a_local_decode_worker_needs_no_prefill_worker():
    cluster = Cluster()
    cluster.add("p1")
    cluster.add("d1", prefill_mode="local")
    for policy in POLICIES:
        assert cluster.names(msgspec.structs.replace(RULES, policy=policy)) == (None, "d1")


def test_an_auto_decode_worker_computes_itself_what_it_holds():
    cluster = Cluster()
    cluster.add("p1", report=load(waiting_tokens=500))
    cluster.add("d1", prefill_mode="auto")
    cluster.held = {"d1": 144}
    assert cluster.names() == (None, "d1")
    cluster.held = {"p1": 144}
    cluster.directory.heartbeat(cluster.directory.find("p1"), load())
    assert cluster.names() == ("p1", "d1")


def test_without_any_prefill_worker_decode_computes_unless_that_is_forbidden():
    cluster = Cluster()
    cluster.add("d1")
    assert cluster.names() == (None, "d1")
    shortage = cluster.place(msgspec.structs.replace(RULES, local_fallback=False))
    assert isinstance(shortage, Shortage) and shortage.role == "prefill"
    for policy in ("round_robin", "random"):
        rules = msgspec.structs.replace(RULES, policy=policy)
        assert cluster.names(rules) == (None, "d1")
        assert isinstance(cluster.place(msgspec.structs.replace(rules, local_fallback=False)), Shortage)


def test_remote_is_not_bypassed_by_the_fallback_while_a_prefill_worker_is_up():
    cluster = Cluster()
    cluster.add("p1", report=load(waiting_tokens=10**6))
    cluster.add("d1")
    assert cluster.names() == ("p1", "d1")


def test_excluded_workers_are_not_chosen():
    cluster = Cluster()
    one = cluster.add("p1")
    cluster.add("p2")
    other = cluster.add("d1")
    cluster.add("d2")
    chosen = {
        cluster.names(exclude_prefill=frozenset({one.slot}), exclude_decode=frozenset({other.slot})) for _ in range(5)
    }
    assert chosen == {("p2", "d2")}


def test_no_decode_worker_is_a_shortage_of_that_role():
    cluster = Cluster()
    cluster.add("p1")
    cluster.add("d1", report=load(state=State.DRAINING))
    shortage = cluster.place()
    assert isinstance(shortage, Shortage) and shortage.role == "decode"


def test_a_prompt_no_worker_can_ever_hold_says_how_much_fits():
    cluster = Cluster()
    cluster.add("p1")
    cluster.add("d1", max_tokens_total=100)
    shortage = cluster.place(num_tokens=100)
    assert isinstance(shortage, Shortage) and (shortage.role, shortage.largest) == ("fits", 100)
    assert isinstance(cluster.place(num_tokens=99), Choice)


def test_full_queues_everywhere_are_a_shortage_of_capacity():
    cluster = Cluster()
    cluster.add("p1")
    cluster.add("d1", report=load(waiting_requests=2000))
    shortage = cluster.place()
    assert isinstance(shortage, Shortage) and shortage.role == "capacity"


def test_a_session_stays_with_one_pair_among_equals_and_sessions_spread():
    cluster = Cluster()
    for name in ("p1", "p2", "p3", "d1", "d2", "d3"):
        cluster.add(name)
    homes = {session: {cluster.names(session=session) for _ in range(5)} for session in range(1, 40)}
    assert all(len(pairs) == 1 for pairs in homes.values())
    assert len(set.union(*homes.values())) > 5


def test_another_prefill_worker_for_a_running_request_respects_the_pair():
    cluster = Cluster(mixed_fingerprints=True)
    one = cluster.add("p1")
    two = cluster.add("p2")
    cluster.add("p3", revision="other")
    decode = cluster.add("d1")
    for policy in POLICIES:
        rules = msgspec.structs.replace(RULES, policy=policy)
        job = cluster.job(exclude_prefill=frozenset({one.slot}))
        fleet = cluster.directory.fleet
        assert choose_prefill(fleet, job, rules, cluster.picker, now=0.0, decode=decode.slot) == two.slot
        job = cluster.job(exclude_prefill=frozenset({one.slot, two.slot}))
        assert choose_prefill(fleet, job, rules, cluster.picker, now=0.0, decode=decode.slot) == NONE


@pytest.mark.parametrize("policy", POLICIES)
def test_a_thousand_workers_cost_as_few_calls_as_forty(policy):
    """Choices are over arrays: a worker costs no Python call (milliseconds are in ``benchmarks/route_scale.py``)."""
    rules, costs = msgspec.structs.replace(RULES, policy=policy), []
    for workers in (20, 500):
        cluster, rng = Cluster(), random.Random(3)
        for index in range(workers):
            busy = load(waiting_tokens=rng.randrange(10_000), running_requests=rng.randrange(8))
            cluster.add(f"p{index}", report=busy)
            cluster.add(f"d{index}", report=busy)
        job, fleet = cluster.job(), cluster.directory.fleet
        costs.append(
            calls_of(lambda job=job, fleet=fleet, c=cluster: choose_pair(fleet, job, rules, c.picker, now=0.0))
        )
    assert max(costs) < 400, costs
    assert costs[1] < costs[0] + 40, costs
