"""Owned tasks, the mailbox that threads post to, deadlines."""

import asyncio
import threading

import pytest

from core.aio import Deadline, Mailbox, Tasks, within
from core.clock import ManualClock
from core.errors import DeadlineExceeded


async def test_closing_a_task_set_cancels_and_awaits_every_task():
    tasks = Tasks()
    cleaned = []

    async def work(number):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(number)

    for number in range(3):
        tasks.spawn(work(number), name=f"work {number}")
    await asyncio.sleep(0)
    await tasks.close()
    assert sorted(cleaned) == [0, 1, 2]
    assert len(tasks) == 0


async def test_a_closed_task_set_refuses_work_and_leaves_no_coroutine_behind():
    tasks = Tasks()
    await tasks.close()

    async def work():
        pass

    with pytest.raises(RuntimeError, match="closed"):
        tasks.spawn(work(), name="late")


async def test_a_crash_is_logged_and_told_with_the_name_of_the_task(caplog):
    told = []
    tasks = Tasks(on_crash=lambda name, error: told.append((name, str(error))))

    async def crash():
        raise ValueError("planted")

    tasks.spawn(crash(), name="fragile")
    assert str(await tasks.crashed()) == "planted"
    assert told == [("fragile", "planted")]
    assert "fragile" in caplog.text
    await tasks.close()


async def test_a_task_may_close_its_own_set():
    tasks = Tasks()
    done = asyncio.Event()

    async def close_all():
        await tasks.close()
        done.set()

    tasks.spawn(close_all(), name="closer")
    async with asyncio.timeout(30):
        await done.wait()


async def test_a_task_that_ends_is_forgotten():
    tasks = Tasks()

    async def work():
        pass

    await tasks.spawn(work(), name="short")
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_a_mailbox_gives_everything_in_order():
    mailbox = Mailbox(10)
    for number in range(3):
        assert mailbox.post(number)
    assert await mailbox.get_all() == [0, 1, 2]
    mailbox.post(3)
    assert await mailbox.get() == 3


async def test_a_full_mailbox_refuses_and_a_put_waits_for_room():
    mailbox = Mailbox(2)
    assert mailbox.post(1)
    assert mailbox.post(2)
    assert not mailbox.post(3)
    waiting = asyncio.ensure_future(mailbox.put(3))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await mailbox.get() == 1
    assert await waiting
    assert await mailbox.get_all() == [2, 3]


async def test_several_waiting_puts_all_get_through_a_small_mailbox():
    mailbox = Mailbox(1)
    puts = [asyncio.ensure_future(mailbox.put(number)) for number in range(20)]
    got = [await mailbox.get() for _ in range(20)]
    assert sorted(got) == list(range(20))
    assert all(await asyncio.gather(*puts))


async def test_closing_lets_the_consumer_take_the_rest_and_ends_it():
    mailbox = Mailbox(4)
    mailbox.post(1)
    mailbox.close()
    assert not mailbox.post(2)
    assert not await mailbox.put(2)
    assert await mailbox.get_all() == [1]
    assert await mailbox.get_all() == []
    assert await mailbox.get() is None


async def test_closing_wakes_a_waiting_consumer_and_a_waiting_producer():
    empty, full = Mailbox(1), Mailbox(1)
    full.post(1)
    consumer, producer = asyncio.ensure_future(empty.get()), asyncio.ensure_future(full.put(2))
    await asyncio.sleep(0)
    empty.close()
    full.close()
    assert await consumer is None
    assert await producer is False


async def test_a_cancelled_get_loses_nothing():
    mailbox = Mailbox(4)
    waiting = asyncio.ensure_future(mailbox.get())
    await asyncio.sleep(0)
    mailbox.post(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await mailbox.get() == 1


async def test_threads_may_post_and_the_order_of_each_is_kept():
    mailbox = Mailbox(10_000)
    per_thread = 500

    def produce(name):
        for number in range(per_thread):
            assert mailbox.post((name, number))

    threads = [threading.Thread(target=produce, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    got = []
    async with asyncio.timeout(30):
        while len(got) < 4 * per_thread:
            got += await mailbox.get_all()
    for thread in threads:
        thread.join()
    for name in range(4):
        assert [number for owner, number in got if owner == name] == list(range(per_thread))


def test_a_post_after_the_loop_has_ended_is_quietly_refused_from_then_on():
    async def make():
        return Mailbox(4)

    mailbox = asyncio.run(make())
    thread = threading.Thread(target=mailbox.post, args=(1,))
    thread.start()
    thread.join()
    assert mailbox.is_closed
    assert not mailbox.post(2)


def test_a_deadline_follows_its_clock():
    clock = ManualClock()
    deadline = Deadline(clock, 2.0)
    assert deadline.remaining_s == 2.0
    clock.advance(1.5)
    assert (deadline.remaining_s, deadline.has_passed) == (0.5, False)
    clock.advance(0.5)
    assert (deadline.remaining_s, deadline.has_passed) == (0.0, True)


async def test_within_names_what_took_too_long():
    with pytest.raises(DeadlineExceeded, match=r"waiting for ever took longer than 0\.01 s"):
        async with within(0.01, "waiting for ever"):
            await asyncio.Event().wait()


async def test_within_lets_a_timeout_of_the_body_pass():
    with pytest.raises(TimeoutError):
        async with within(5, "the body"):
            raise TimeoutError


async def test_within_stays_cancellable():
    async def body():
        async with within(5, "the body"):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
