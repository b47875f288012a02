import asyncio
import random

import pytest

from core.clock import ManualClock
from core.errors import DeadlineExceeded, Draining, NoCapacity
from gateway.admission import Admission, Limits


def admission(in_flight=1, queued=10, timeout_s=5.0):
    clock = ManualClock()
    return Admission(clock, Limits(max_in_flight=in_flight, max_queued=queued, queue_timeout_s=timeout_s)), clock


async def hold(gate, order, name, *, priority=0, timeout_s=5.0, release=None):
    async with gate.permit(priority=priority, timeout_s=timeout_s):
        order.append(name)
        if release is not None:
            await release.wait()


async def test_never_more_than_the_limit_run_at_once():
    gate, _ = admission(in_flight=3, queued=100)
    running, worst = 0, 0

    async def one():
        nonlocal running, worst
        async with gate.permit(priority=0, timeout_s=5):
            running += 1
            worst = max(worst, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(one() for _ in range(50)))
    assert worst == 3
    assert (gate.in_flight, gate.queued) == (0, 0)


async def test_lower_priority_values_go_first_and_equals_in_order():
    gate, _ = admission()
    order, release = [], asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, order, "first", release=release))]
    await asyncio.sleep(0)
    for name, priority in (("b1", 1), ("a1", 0), ("b2", 1), ("a2", 0), ("urgent", -1)):
        tasks.append(asyncio.create_task(hold(gate, order, name, priority=priority)))
        await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "urgent", "a1", "a2", "b1", "b2"]


async def test_a_full_queue_refuses_with_a_time_that_follows_from_the_rate():
    gate, clock = admission(queued=2)
    for _ in range(10):
        async with gate.permit(priority=0, timeout_s=5):
            clock.advance(4.0)
    release, order = asyncio.Event(), []
    tasks = [asyncio.create_task(hold(gate, order, index, release=release)) for index in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity) as caught:
        await hold(gate, order, "late")
    # One ending every 4 s (the last span still open), two in front.
    assert caught.value.retry_after_s == pytest.approx(12.0, rel=0.15)
    release.set()
    await asyncio.gather(*tasks)


async def test_the_queue_gives_up_after_its_time_and_the_deadline_after_its_own():
    gate, _ = admission(timeout_s=0.02)
    release, order = asyncio.Event(), []
    holder = asyncio.create_task(hold(gate, order, "first", release=release))
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity, match="no permit within"):
        await hold(gate, order, "slow")
    with pytest.raises(DeadlineExceeded):
        await hold(gate, order, "late", timeout_s=0.01)
    release.set()
    await holder
    assert (gate.in_flight, gate.queued) == (0, 0)


async def test_draining_refuses_new_ones_and_runs_those_queued():
    gate, _ = admission()
    release, order = asyncio.Event(), []
    tasks = [asyncio.create_task(hold(gate, order, name, release=release)) for name in ("a", "b")]
    await asyncio.sleep(0)
    gate.drain()
    with pytest.raises(Draining):
        await hold(gate, order, "late")
    idle = asyncio.create_task(gate.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    release.set()
    await asyncio.gather(*tasks)
    await idle
    assert order == ["a", "b"]


async def test_permits_are_exact_under_a_storm_of_cancellations():
    gate, _ = admission(in_flight=4, queued=1000)
    rng = random.Random(5)

    async def one():
        async with gate.permit(priority=rng.randrange(3), timeout_s=5):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)

    tasks = []
    for _ in range(600):
        tasks.append(asyncio.create_task(one()))
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        assert gate.in_flight <= 4
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (gate.in_flight, gate.queued) == (0, 0)
    async with gate.permit(priority=0, timeout_s=1):
        assert gate.in_flight == 1
