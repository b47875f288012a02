"""Engine events reach the event loop, in order."""

import asyncio
import threading

import numpy as np
import pytest

from core.worker import KvEvent, KvEventBatch
from engine.events import StepEvents
from engine.loop_sink import LoopSink


async def test_events_of_another_thread_arrive_in_order_with_their_kv_batches_first():
    sink = LoopSink(asyncio.get_running_loop(), pytest.fail)
    heard, done = [], asyncio.Event()

    def on_step(events):
        heard.append(int(events.tokens[0]))
        if len(heard) == 20:
            done.set()

    sink.connect(on_step, heard.append)
    event = KvEvent(kind="stored", hashes=(1,))

    def scheduler():
        for token in range(19):
            batch = {"kv_events": (event,), "kv_sequence": 1} if token == 7 else {}
            sink.emit(StepEvents(tokens=np.array([token], np.int32), **batch))

    thread = threading.Thread(target=scheduler)
    thread.start()
    await asyncio.wait_for(done.wait(), 30)
    thread.join()
    assert heard == [*range(7), KvEventBatch(sequence=1, events=(event,)), *range(7, 19)]


def test_events_after_the_end_of_the_loop_are_dropped():
    loop = asyncio.new_event_loop()
    sink = LoopSink(loop, pytest.fail)
    loop.close()
    sink.emit(StepEvents(tokens=np.array([1], np.int32)))


async def test_a_receiver_that_raises_is_told_to_the_owner():
    crashes = []
    sink = LoopSink(asyncio.get_running_loop(), crashes.append)
    error = RuntimeError("planted")

    def on_step(events):
        raise error

    sink.connect(on_step, lambda batch: None)
    sink.emit(StepEvents(tokens=np.array([1], np.int32)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert crashes == [error]
