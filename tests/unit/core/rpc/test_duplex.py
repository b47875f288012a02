"""The client's half of a call against a scripted call object: posting, reading, ending, closing."""

import asyncio

import grpc
import pytest
from grpc import aio

from core.errors import Draining, NoCapacity, WorkerLost
from core.rpc.duplex import ACCEPTED_KEY, Duplex


class Channel:
    def __init__(self):
        self.closed = 0

    async def close(self):
        self.closed += 1


class Call:
    """What gRPC's stream call does, by hand: `end` sets its status."""

    def __init__(self, initial=()):
        self.initial = initial
        self.written = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.inbox = asyncio.Queue()
        self.status = asyncio.get_running_loop().create_future()
        self.trailing = ()
        self.details_text = ""
        self.half_closed = False
        self.ends_in_order = False

    def end(self, status, trailing=(), details=""):
        if not self.status.done():
            self.trailing, self.details_text = trailing, details
            self.status.set_result(status)
        self.inbox.put_nowait(aio.EOF)

    def done(self):
        return self.status.done()

    async def write(self, message):
        await self.gate.wait()
        if self.done():
            raise asyncio.InvalidStateError
        self.written.append(message)

    async def done_writing(self):
        self.half_closed = True
        if self.ends_in_order:
            self.end(grpc.StatusCode.OK)

    async def read(self):
        message = await self.inbox.get()
        if message is aio.EOF and self.status.done() and self.status.result() is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        return message

    async def initial_metadata(self):
        return aio.Metadata(*self.initial)

    async def code(self):
        return await asyncio.shield(self.status)

    async def details(self):
        return self.details_text

    async def trailing_metadata(self):
        return aio.Metadata(*self.trailing)

    def cancel(self):
        self.end(grpc.StatusCode.CANCELLED)


def a_duplex(outbox=4, **call):
    channel, made = Channel(), Call(**call)
    return Duplex(channel, made, "peer 1", outbox), made, channel


async def test_posted_messages_are_written_in_order_by_one_writer():
    duplex, call, _ = a_duplex()
    for number in range(4):
        duplex.post(number)
    await duplex.send(4)
    call.ends_in_order = True
    await duplex.close()
    assert call.written == [0, 1, 2, 3, 4]
    assert call.half_closed


async def test_a_peer_that_does_not_read_is_no_capacity_and_no_lost_message_later():
    duplex, call, _ = a_duplex(outbox=2)
    call.gate.clear()
    duplex.post(0)
    await asyncio.sleep(0)  # the writer takes the first and waits
    duplex.post(1)
    duplex.post(2)
    with pytest.raises(NoCapacity, match="peer 1"):
        duplex.post(3)
    call.gate.set()
    await duplex.send(4)
    call.ends_in_order = True
    await duplex.close()
    assert call.written == [0, 1, 2, 4]


async def test_reading_gives_messages_and_then_the_peers_error():
    duplex, call, _ = a_duplex()
    call.inbox.put_nowait("one")
    assert await duplex.read() == "one"
    call.end(grpc.StatusCode.UNAVAILABLE, (("tandem-code", "draining"),), "leaving")
    with pytest.raises(Draining, match="leaving"):
        await duplex.read()
    with pytest.raises(WorkerLost):
        await duplex.send("late")
    await duplex.close()


async def test_an_orderly_end_of_the_peer_is_a_lost_worker():
    duplex, call, _ = a_duplex()
    call.end(grpc.StatusCode.OK)
    with pytest.raises(WorkerLost, match="closed the stream"):
        await duplex.read()
    await duplex.close()


async def test_acceptance_needs_the_peers_word():
    duplex, _, _ = a_duplex(initial=((ACCEPTED_KEY, "1"),))
    await duplex.accepted(1.0)
    await duplex.close(flush_s=0)
    duplex, call, _ = a_duplex()
    call.end(grpc.StatusCode.UNAVAILABLE, (("tandem-code", "worker_lost"),), "another incarnation")
    with pytest.raises(WorkerLost, match="another incarnation"):
        await duplex.accepted(1.0)
    await duplex.close()


async def test_acceptance_that_never_comes_costs_the_timeout():
    duplex, _, _ = a_duplex()
    with pytest.raises(WorkerLost, match="in time"):
        await duplex.accepted(0.01)
    await duplex.close(flush_s=0)


async def test_close_waits_only_briefly_for_a_peer_that_does_not_read():
    duplex, call, channel = a_duplex()
    call.gate.clear()
    duplex.post(1)
    async with asyncio.timeout(30):
        await duplex.close(flush_s=0.02)
    assert (call.written, channel.closed) == ([], 1)


async def test_close_is_idempotent_and_ends_a_waiting_reader():
    duplex, _, channel = a_duplex()
    reading = asyncio.ensure_future(duplex.read())
    await asyncio.sleep(0)
    await duplex.close(flush_s=0)
    await duplex.close()
    with pytest.raises(WorkerLost, match="closed here"):
        await reading
    assert channel.closed == 1


async def test_a_cancelled_reader_stays_cancelled():
    duplex, _, _ = a_duplex()
    reading = asyncio.ensure_future(duplex.read())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await duplex.close(flush_s=0)


async def test_a_cancelled_close_still_ends_call_and_channel():
    duplex, call, channel = a_duplex()
    closing = asyncio.ensure_future(duplex.close(flush_s=30))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert call.done()
    assert channel.closed == 1


async def test_closing_inside_the_cleanup_of_a_cancelled_task_ends_everything():
    """The task's own cancellation is in flight: neither the flush's timeout nor the call's end may replace it."""
    duplex, _, channel = a_duplex()

    async def user():
        try:
            await asyncio.Event().wait()
        finally:
            await duplex.close(flush_s=0.01)

    task = asyncio.ensure_future(user())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert channel.closed == 1
