"""The lease table: expiry, renewal, limits, and what a lease lets a peer read."""

import threading

import numpy as np
import pytest

from core.clock import ManualClock
from core.errors import NoCapacity
from core.ids import Incarnation, LeaseId, TransferId
from kv_transfer.lease import LeaseTable
from tests.fakes.kv_pools import make_layout
from tests.fakes.work import calls_of

PEER = Incarnation("peer")
LAYOUT = make_layout(num_pages=64, page_bytes=100, index_bytes=10, gap=6)


@pytest.fixture
def clock():
    return ManualClock()


def table(clock, max_per_peer=100, orphan_ttl_s=10.0):
    return LeaseTable(layout=LAYOUT, clock=clock, max_per_peer=max_per_peer, orphan_ttl_s=orphan_ttl_s)


def grant(leases, ttl_s=5.0, peer=PEER, name="t"):
    return leases.grant(peer, TransferId(name), ttl_s)[0]


def readable(leases, lease, region, *runs):
    offsets, nbytes = (np.array(column, np.int64) for column in zip(*runs, strict=True))
    return leases.readable(lease, region, offsets, nbytes)


def test_a_lease_lives_until_its_time_and_never_comes_back(clock):
    leases = table(clock)
    lease = grant(leases, 5)
    clock.advance(4.9)
    assert leases.alive(lease)
    clock.advance(0.1)
    assert not leases.alive(lease)
    assert not leases.renew(lease, 100)
    assert not leases.extend(lease, [1])
    assert not leases.end(lease)


def test_ending_says_whether_the_lease_lived_and_ends_it_once(clock):
    leases = table(clock)
    lease = grant(leases)
    assert leases.end(lease)
    assert not leases.end(lease)
    assert len(leases) == 0


def test_a_renewal_never_shortens_a_lease(clock):
    leases = table(clock)
    lease = grant(leases, 8)
    assert leases.renew(lease, 1)
    clock.advance(7.9)
    assert leases.alive(lease)


def test_the_first_life_is_short_until_somebody_asks_for_more(clock):
    leases = table(clock, orphan_ttl_s=2)
    lease, life = leases.grant(PEER, TransferId("t"), 30)
    assert life == 2
    leases.renew(lease, 30)
    clock.advance(29)
    assert leases.alive(lease)


def test_the_reaper_finds_lapsed_leases_behind_renewed_ones(clock):
    leases = table(clock)
    first, second, third = (grant(leases, 5, name=str(i)) for i in range(3))
    clock.advance(4)
    leases.renew(first, 5)
    clock.advance(2)
    assert {lease.id for lease in leases.expired()} == {second, third}
    assert leases.expired() == []
    assert leases.alive(first)


def test_a_peer_may_hold_only_so_many_leases(clock):
    leases = table(clock, max_per_peer=2)
    held = [grant(leases, name=str(i)) for i in range(2)]
    with pytest.raises(NoCapacity) as caught:
        grant(leases)
    assert caught.value.retry_after_s == 1.0
    grant(leases, peer=Incarnation("other"))
    leases.end(held[0])
    grant(leases)


def test_orphans_do_not_accumulate(clock):
    leases = table(clock, max_per_peer=50)
    for i in range(10_000):
        try:
            grant(leases, name=str(i))
        except NoCapacity:
            clock.advance(10)
            leases.expired()
    assert len(leases) <= 50


def test_reaping_costs_calls_by_the_lease_and_not_by_its_square(clock):
    leases = table(clock, max_per_peer=20_000)
    for i in range(10_000):
        leases.extend(grant(leases, name=str(i)), [1, 2, 3])
    clock.advance(10)
    reaped = []
    assert calls_of(lambda: reaped.extend(leases.expired())) < 20 * 10_000
    assert len(reaped) == 10_000


def test_only_leased_pages_are_readable_in_every_component(clock):
    leases = table(clock)
    lease = grant(leases)
    leases.extend(lease, [3, 4, 9])
    assert readable(leases, lease, 0, (300, 200))
    assert readable(leases, lease, 0, (300, 100), (910, 50))
    assert not readable(leases, lease, 0, (300, 201))
    assert not readable(leases, lease, 0, (300, 200), (0, 1))
    assert not readable(leases, lease, 0, (299, 1))
    assert readable(leases, lease, 1, (48, 10), (64, 10))
    assert not readable(leases, lease, 1, (48, 11)), "the gap between records belongs to nobody"
    assert not readable(leases, lease, 1, (48, 26))
    assert not readable(leases, lease, 7, (0, 1))


def test_rows_are_readable_only_when_covered(clock):
    leases = table(clock)
    lease = grant(leases)
    leases.extend(lease, [2])
    assert not readable(leases, lease, 2, (320, 160))
    leases.cover_row(lease, 2)
    assert readable(leases, lease, 2, (320, 160))
    assert not readable(leases, lease, 2, (320, 161))
    assert readable(leases, lease, 3, (128, 48))


def test_nothing_is_readable_without_a_living_lease(clock):
    leases = table(clock)
    lease = grant(leases, 5)
    leases.extend(lease, [3])
    assert not readable(leases, LeaseId(lease + 1), 0, (300, 1))
    clock.advance(5)
    assert not readable(leases, lease, 0, (300, 1))


@pytest.mark.parametrize("run", [(-100, 10), (0, -1), (0, 0), (6400, 100), (2**62, 2**61)])
def test_hostile_ranges_are_not_readable(clock, run):
    leases = table(clock)
    lease = grant(leases)
    leases.extend(lease, range(64))
    assert not readable(leases, lease, 0, run)


@pytest.mark.parametrize("region", [0, 1])
def test_what_is_readable_is_what_a_byte_by_byte_look_finds(clock, region):
    leases = table(clock)
    lease = grant(leases)
    rng = np.random.default_rng(region)
    pages = sorted(set(rng.integers(0, 64, 40).tolist()))
    leases.extend(lease, pages)
    stride, record = ((100, 100), (16, 10))[region]
    allowed = {page * stride + at for page in pages for at in range(record)}
    far = [-(2**63), -1, 2**63 - 1, 2**62]
    answers = set()
    for _ in range(2000):
        start = int(rng.integers(-20, 64 * stride + 20)) if rng.random() < 0.95 else far[rng.integers(4)]
        nbytes = int(rng.integers(0, 3 * stride)) if rng.random() < 0.95 else far[rng.integers(4)]
        expected = 0 < nbytes < 10_000 and all(at in allowed for at in range(start, start + nbytes))
        assert readable(leases, lease, region, (start, nbytes)) == expected, (start, nbytes)
        answers.add(expected)
    assert answers == {True, False}


def test_threads_may_ask_while_the_loop_extends(clock):
    leases = table(clock)
    lease = grant(leases)
    wrong = []

    def ask():
        for _ in range(300):
            if readable(leases, lease, 0, (0, 6400)) and len(leases) != 1:
                wrong.append(1)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for page in range(64):
        leases.extend(lease, [page])
    for thread in threads:
        thread.join()
    assert not wrong
    assert readable(leases, lease, 0, (0, 6400))
    assert leases.num_pages == 64
