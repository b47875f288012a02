import asyncio
import logging
import threading

import pytest

from core.clock import SystemClock
from core.errors import BadRequest, InvariantError, NoCapacity, WorkerLost
from engine.config import EngineConfig
from engine.engine import Engine
from engine.engine_thread import CallInbox, EngineThread, _Call
from tests.fakes.engine_rig import Collector, Facts, hasher_of, layout_of, request_of
from tests.fakes.kv_runner import KvRunner, reply

PROMPT = list(range(1, 24))
LATER = 1e12


class AsyncSink(Collector):
    """Collects on the scheduler thread and wakes the test when something ended."""

    def __init__(self, loop):
        super().__init__()
        self.loop, self.ended, self.threads = loop, asyncio.Event(), set()

    def emit(self, events):
        super().emit(events)
        self.threads.add(threading.get_ident())
        if events.finished or events.failed or events.prefilled:
            self.loop.call_soon_threadsafe(self.ended.set)


class Bench:
    """A started engine thread and what it needs."""

    def __init__(self, **settings):
        self.config = EngineConfig(**{"page_tokens": 4, "num_pages": 64, "num_rows": 8, "chunk_tokens": 16, **settings})
        self.clock = SystemClock()
        self.engine = Engine(
            config=self.config,
            facts=Facts(),
            layout=layout_of(self.config),
            hasher=hasher_of(self.config),
            clock=self.clock,
        )
        self.runner = KvRunner(64, 8, 4)
        self.sink = AsyncSink(asyncio.get_running_loop())
        self.crashes, self.crashed = [], asyncio.Event()
        loop = asyncio.get_running_loop()
        self.thread = EngineThread(
            engine=self.engine,
            runner=self.runner,
            sink=self.sink,
            clock=self.clock,
            on_crash=lambda error: (self.crashes.append(error), loop.call_soon_threadsafe(self.crashed.set)),
        )

    async def __aenter__(self):
        self.thread.start()
        return self

    async def __aexit__(self, *_):
        await self.thread.stop()

    async def until_ended(self, seq):
        async with asyncio.timeout(30):
            while seq not in self.sink.finished and seq not in self.sink.failed:
                await self.sink.ended.wait()
                self.sink.ended.clear()


async def test_a_call_runs_on_the_scheduler_thread_and_answers():
    async with Bench() as bench:
        ident = await bench.thread.call(lambda engine: threading.get_ident())
        seq = await bench.thread.call(lambda engine: engine.submit(request_of(PROMPT, 9), LATER))
        await bench.until_ended(seq)
        assert bench.sink.tokens[seq] == reply(PROMPT, 9)
        assert bench.sink.threads == {ident}
        assert ident != threading.get_ident()


async def test_what_a_call_raises_reaches_the_caller_and_the_loop_goes_on():
    async with Bench() as bench:
        with pytest.raises(BadRequest, match="vocabulary"):
            await bench.thread.call(lambda engine: engine.submit(request_of([500], 1), LATER))
        assert await bench.thread.call(lambda engine: engine.audit()) == []


async def test_posted_calls_run_in_order():
    async with Bench() as bench:
        seen = []
        for i in range(100):
            bench.thread.post(lambda engine, i=i: seen.append(i))
        await bench.thread.call(lambda engine: None)
        assert seen == list(range(100))


async def test_a_refused_post_is_logged_and_the_loop_goes_on(caplog):
    async with Bench() as bench:
        bench.thread.post(lambda engine: engine.submit(request_of([500], 1), LATER))
        await bench.thread.call(lambda engine: None)
    assert "refused" in caplog.text


async def test_a_cancelled_caller_disturbs_nobody():
    async with Bench() as bench:
        gate = threading.Event()
        bench.thread.post(lambda engine: gate.wait(60))
        task = asyncio.ensure_future(bench.thread.call(lambda engine: 1))
        await asyncio.sleep(0)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await bench.thread.call(lambda engine: 2) == 2


async def test_what_any_thread_may_ask_waits_for_no_step():
    async with Bench() as bench:
        seq = await bench.thread.call(lambda engine: engine.submit_source(request_of(PROMPT, 9), LATER))
        await bench.sink.ended.wait()
        gate = threading.Event()
        bench.thread.post(lambda engine: gate.wait(60))
        assert bench.thread.look(lambda engine: engine.epochs_unchanged(seq))
        gate.set()
        await bench.thread.call(lambda engine: engine.release(seq))
        assert not bench.thread.look(lambda engine: engine.epochs_unchanged(seq))
    with pytest.raises(WorkerLost, match="stopped"):
        bench.thread.look(lambda engine: engine.epochs_unchanged(seq))


async def test_an_idle_engine_sleeps_and_its_heart_beats():
    async with Bench() as bench:
        await bench.thread.call(lambda engine: None)
        begun, passes = bench.clock.now(), bench.thread.times.passes
        async with asyncio.timeout(30):
            while bench.thread.times.passes < passes + 4:  # noqa: ASYNC110 - its thread has no event here
                await asyncio.sleep(0.05)
        assert bench.clock.now() - begun > 0.3, "it does not sleep between passes"
        assert bench.thread.heartbeat_age_s() < bench.clock.now() - begun


async def test_a_bug_in_a_call_stops_the_engine_and_fails_everybody(caplog):
    def bug(engine):
        raise InvariantError("planted")

    bench = Bench()
    gate = threading.Event()
    async with bench:
        bench.thread.post(lambda engine: gate.wait(60))
        broken = asyncio.ensure_future(bench.thread.call(bug))
        behind = asyncio.ensure_future(bench.thread.call(lambda engine: 1))
        await asyncio.sleep(0)
        with caplog.at_level(logging.CRITICAL):
            gate.set()
            with pytest.raises(InvariantError, match="planted"):
                await broken
            with pytest.raises(WorkerLost, match="planted"):
                await behind
        with pytest.raises(WorkerLost):
            await bench.thread.call(lambda engine: 1)
        bench.thread.post(lambda engine: 1)
    assert not bench.thread.is_alive
    assert str(bench.crashes[0]) == "planted"
    assert bench.thread.crash is bench.crashes[0]
    assert "last operations" in caplog.text


async def test_a_crash_of_the_runner_stops_the_engine_with_its_last_operations_in_the_log(caplog):
    bench = Bench()

    def explode(handle):
        raise RuntimeError("kernel fault")

    bench.runner.collect = explode
    async with bench:
        seq = await bench.thread.call(lambda engine: engine.submit(request_of(PROMPT, 9), LATER))
        async with asyncio.timeout(30):
            await bench.crashed.wait()
    assert "kernel fault" in caplog.text
    assert f"prefilling sequence {seq}" in caplog.text


async def test_stop_is_idempotent_and_ends_the_runner():
    bench = Bench()
    closed = []
    bench.runner.close = lambda: closed.append(1)
    async with bench:
        await bench.thread.call(lambda engine: engine.submit(request_of(PROMPT, 50), LATER))
        await bench.thread.stop()
    assert closed == [1]
    assert not bench.thread.is_alive


async def test_stop_before_start_ends_the_runner_too():
    bench = Bench()
    await bench.thread.stop()
    with pytest.raises(WorkerLost):
        await bench.thread.call(lambda engine: 1)


def test_a_full_inbox_refuses():
    inbox = CallInbox(limit=2)
    for _ in range(2):
        inbox.put(_Call(lambda engine: None))
    with pytest.raises(NoCapacity):
        inbox.put(_Call(lambda engine: None))
    assert inbox.run_some(None, limit=1) == 1
    inbox.put(_Call(lambda engine: None))


def test_a_full_inbox_takes_what_gives_back():
    """A `drop` that is refused would leave its pages LANDING for ever."""
    inbox, ran = CallInbox(limit=1), []
    inbox.put(_Call(lambda engine: ran.append("take")))
    inbox.put(_Call(lambda engine: ran.append("give back")), always=True)
    assert inbox.run_some(None, limit=2) == 2
    assert ran == ["take", "give back"]


def test_a_closed_inbox_wakes_the_sleeper_and_refuses():
    inbox = CallInbox()
    sleeper = threading.Thread(target=inbox.wait, args=(30,))
    sleeper.start()
    inbox.close()
    sleeper.join(60)
    assert not sleeper.is_alive()
    with pytest.raises(WorkerLost):
        inbox.put(_Call(lambda engine: None))
