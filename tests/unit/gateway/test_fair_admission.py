"""Fairness between tenants, aging, bounds: whoever asks more gets no more than its share."""

import asyncio

import pytest

from core.clock import ManualClock
from core.errors import NoCapacity
from gateway.admission import Admission, Limits
from gateway.tenants import Tenant


def admission(*tenants, clock=None, **limits):
    known = {tenant.name: tenant for tenant in tenants}
    clock = clock or ManualClock()
    return Admission(clock, Limits(**limits), lambda name: known.get(name, Tenant(name="anyone"))), clock


async def hold(gate, order, tenant, *, release, **options):
    async with gate.permit(tenant=tenant, priority=options.pop("priority", 0), timeout_s=60, **options):
        order.append(tenant)
        await release.wait()


async def served(gate, asks, *, steps):
    """Let everybody ask, then end one sample after the other; return who got permits, in order."""
    order, releases, tasks = [], [], []

    async def one(tenant, cost):
        release = asyncio.Event()
        async with gate.permit(tenant=tenant, priority=0, timeout_s=60, cost=cost):
            order.append(tenant)
            releases.append(release)
            await release.wait()

    for tenant, cost in asks:
        tasks.append(asyncio.create_task(one(tenant, cost)))
        await asyncio.sleep(0)
    for _ in range(steps):
        releases.pop(0).set()
        for _ in range(4):
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (gate.in_flight, gate.queued) == (0, 0)
    return order


async def test_a_tenant_that_asks_ten_times_as_much_gets_no_more():
    gate, _ = admission(max_in_flight=1, max_queued=1000)
    order = await served(gate, [("loud", 1)] * 100 + [("quiet", 1)] * 10, steps=20)
    assert order[1:21].count("quiet") == 10


async def test_permits_follow_weights_and_costs():
    gate, _ = admission(Tenant(name="big", weight=3), Tenant(name="small"), max_in_flight=1, max_queued=1000)
    order = await served(gate, [("big", 10)] * 60 + [("small", 10)] * 60, steps=40)
    assert 29 <= order[1:41].count("big") <= 31
    gate, _ = admission(max_in_flight=1, max_queued=1000)
    order = await served(gate, [("long", 30)] * 60 + [("short", 10)] * 60, steps=40)
    assert 29 <= order[1:41].count("short") <= 31


async def test_who_rested_has_saved_nothing_up():
    gate, _ = admission(max_in_flight=1, max_queued=1000)
    for _ in range(50):
        async with gate.permit(tenant="busy", priority=0, timeout_s=1):
            pass
    order = await served(gate, [("busy", 1)] * 20 + [("fresh", 1)] * 20, steps=20)
    assert 9 <= order[1:21].count("busy") <= 11


async def test_priority_is_a_head_start_and_starves_nobody():
    gate, clock = admission(max_in_flight=1, max_queued=100, aging_s=5.0)
    order, releases = [], [asyncio.Event() for _ in range(5)]

    async def ask(name, priority, release):
        async with gate.permit(priority=priority, timeout_s=60):
            order.append(name)
            await release.wait()

    tasks = [asyncio.create_task(ask("first", 0, releases[0]))]
    await asyncio.sleep(0)
    for name, priority, passed in (("low", 2, 0.0), ("high in time", 0, 9.0), ("high too late", 0, 2.0)):
        clock.advance(passed)
        tasks.append(asyncio.create_task(ask(name, priority, releases[0])))
        await asyncio.sleep(0)
    releases[0].set()
    await asyncio.gather(*tasks)
    assert order == ["first", "high in time", "low", "high too late"]


async def test_a_tenants_own_bound_leaves_room_for_others():
    gate, _ = admission(Tenant(name="bounded", max_in_flight=2), max_in_flight=4, max_queued=100)
    order, release = [], asyncio.Event()
    tasks = [
        asyncio.create_task(hold(gate, order, tenant, release=release)) for tenant in ["bounded"] * 5 + ["free"] * 2
    ]
    await asyncio.sleep(0.01)
    assert sorted(order) == ["bounded", "bounded", "free", "free"]
    release.set()
    await asyncio.gather(*tasks)
    assert len(order) == 7


async def test_a_full_queue_puts_out_the_last_of_the_longest_line_for_who_has_less():
    gate, _ = admission(max_in_flight=1, max_queued=4)
    order, release = [], asyncio.Event()
    loud = [asyncio.create_task(hold(gate, order, "loud", release=release)) for _ in range(5)]
    await asyncio.sleep(0)
    quiet = asyncio.create_task(hold(gate, order, "quiet", release=release))
    await asyncio.sleep(0.01)
    assert gate.queued == 4
    assert isinstance(loud[-1].exception(), NoCapacity)
    with pytest.raises(NoCapacity):
        await hold(gate, order, "loud", release=release)
    release.set()
    await asyncio.gather(*loud[:-1], quiet)
    assert order.count("quiet") == 1


async def test_who_cannot_be_served_in_time_is_refused_at_once():
    gate, clock = admission(max_in_flight=1, max_queued=100, queue_timeout_s=30)
    for _ in range(20):
        async with gate.permit(priority=0, timeout_s=5):
            clock.advance(4.0)
    order, release = [], asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, order, "a", release=release)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity, match="later than this request can wait") as caught:
        async with gate.permit(priority=0, timeout_s=1.0):
            pass
    assert 8 <= caught.value.retry_after_s <= 16
    release.set()
    await asyncio.gather(*tasks)


async def test_limit_two_queue_one_six_at_once_is_three_served_and_three_refused():
    gate, _ = admission(max_in_flight=2, max_queued=1)
    release, order = asyncio.Event(), []
    tasks = [asyncio.create_task(hold(gate, order, "a", release=release)) for _ in range(6)]
    await asyncio.sleep(0.01)
    release.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [error for error in ended if isinstance(error, NoCapacity)]
    assert len(order) == 3
    assert len(refused) == 3
    assert all(error.retry_after_s >= 1 for error in refused)
