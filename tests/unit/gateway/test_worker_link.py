import asyncio

import pytest

from core.clock import ManualClock
from core.errors import NoCapacity, WorkerLost
from core.ids import Handle, Incarnation
from core.stream import (
    AbortRequest,
    Ack,
    Errored,
    Finished,
    Place,
    Started,
    StepFrame,
    StreamHello,
    Submit,
)
from core.worker import Role
from gateway.links import Links
from gateway.mailbox import Failure, Run
from gateway.worker_link import LinkRules, WorkerLink
from tests.fakes.cluster import registration
from tests.fakes.rpc import a_request

GATEWAY = Incarnation("g")
WORKER = registration("d1", Role.DECODE)
RULES = LinkRules(backoff_s=0.0, ack_s=0.01, max_pending_tokens=10)


class Wire:
    """A stream under the test's thumb."""

    def __init__(self):
        self.sent = []
        self.closed = False
        self.full = False
        self._incoming = asyncio.Queue()

    def post(self, frame):
        if self.full:
            raise NoCapacity("the worker reads nothing")
        self.sent.append(frame)

    async def frames(self):
        while True:
            item = await self._incoming.get()
            if isinstance(item, Exception):
                raise item
            yield item

    def bring(self, item):
        self._incoming.put_nowait(item)

    async def close(self):
        self.closed = True

    def of(self, kind):
        return [frame for frame in self.sent if isinstance(frame, kind)]


class Wires:
    """An opener that hands out wires or errors in order; then only errors."""

    def __init__(self, *items):
        self.items = list(items)
        self.hellos: list[StreamHello] = []

    async def open(self, address, hello, timeout_s=3.0):
        self.hellos.append(hello)
        item = self.items.pop(0) if self.items else WorkerLost("refused")
        if isinstance(item, Exception):
            raise item
        return item


class Rig:
    def __init__(self, *items, rules=RULES):
        self.opener = Wires(*items)
        self.link = WorkerLink(WORKER, gateway=GATEWAY, opener=self.opener, clock=ManualClock(), rules=rules)
        self.task = asyncio.create_task(self.link.run())

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)

    def submit(self, number):
        return self.link.submit(Handle(number), a_request(), None)

    async def close(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def rig():
    rigs = []

    def build(*items, **settings):
        rigs.append(Rig(*items, **settings))
        return rigs[-1]

    yield build
    for each in rigs:
        await each.close()


def frame(sequence, handle=1, position=0, tokens=(), records=()):
    return StepFrame(
        sequence=sequence,
        handles=(handle,) if tokens else (),
        positions=(position,) if tokens else (),
        counts=(len(tokens),) if tokens else (),
        tokens=tuple(tokens),
        records=tuple(records),
    )


async def test_commands_before_the_connection_are_sent_with_it(rig):
    wire = Wire()
    one = rig(wire)
    one.submit(1)
    await one.settle()
    assert [submit.handle for submit in wire.of(Submit)] == [1]
    assert one.opener.hellos == [StreamHello(gateway=GATEWAY, worker=WORKER.incarnation, resume_after=-1)]


async def test_tokens_and_records_reach_their_mailbox_and_the_end_forgets_the_handle(rig):
    wire = Wire()
    one = rig(wire)
    mailbox = one.submit(1)
    await one.settle()
    started = Started(handle=Handle(1), num_cached_tokens=3)
    done = Finished(handle=Handle(1), reason="stop", num_output_tokens=1)
    wire.bring(frame(1, records=[started]))
    wire.bring(frame(2, tokens=[7], records=[done]))
    await one.settle()
    assert await mailbox.take() == [started, Run(0, [7]), done]
    assert one.link.num_open == 0
    one.link.release(Handle(1), "finished")
    assert wire.of(AbortRequest) == []


async def test_frames_seen_before_are_dropped(rig):
    wire = Wire()
    one = rig(wire)
    mailbox = one.submit(1)
    await one.settle()
    wire.bring(frame(1, tokens=[7]))
    wire.bring(frame(1, tokens=[7]))
    wire.bring(frame(2, position=1, tokens=[8]))
    await one.settle()
    assert await mailbox.take() == [Run(0, [7, 8])]


async def test_arrival_is_acknowledged_once_for_many_frames(rig):
    wire = Wire()
    one = rig(wire)
    one.submit(1)
    await one.settle()
    for sequence in range(1, 6):
        wire.bring(frame(sequence, position=sequence - 1, tokens=[7]))
    await one.settle()
    await asyncio.sleep(0.03)
    await one.settle()
    assert wire.of(Ack) == [Ack(sequence=5)]


async def test_a_released_handle_is_aborted_once_however_many_frames_follow(rig):
    wire = Wire()
    one = rig(wire)
    one.submit(1)
    await one.settle()
    one.link.release(Handle(1), "the client left")
    one.link.release(Handle(1), "again")
    for sequence in range(1, 4):
        wire.bring(frame(sequence, position=sequence - 1, tokens=[7]))
    await one.settle()
    assert wire.of(AbortRequest) == [AbortRequest(handle=Handle(1), reason="the client left")]


async def test_a_handle_nobody_knows_is_aborted(rig):
    wire = Wire()
    one = rig(wire)
    await one.settle()
    wire.bring(frame(1, handle=99, tokens=[7]))
    await one.settle()
    assert [abort.handle for abort in wire.of(AbortRequest)] == [99]


async def test_a_broken_connection_resumes_after_the_last_frame(rig):
    first, second = Wire(), Wire()
    one = rig(first, second)
    mailbox = one.submit(1)
    await one.settle()
    first.bring(frame(1, tokens=[7]))
    first.bring(WorkerLost("broken"))
    await one.settle()
    second.bring(frame(1, tokens=[7]))
    second.bring(frame(2, position=1, tokens=[8]))
    await one.settle()
    assert one.opener.hellos[1].resume_after == 1
    assert await mailbox.take() == [Run(0, [7, 8])]
    assert second.of(Submit) == []
    assert first.closed


async def test_what_was_never_answered_fails_after_a_break_and_is_aborted(rig):
    first, second = Wire(), Wire()
    one = rig(first, second)
    answered, silent = one.submit(1), one.submit(2)
    await one.settle()
    first.bring(frame(1, tokens=[7]))
    first.bring(WorkerLost("broken"))
    await one.settle()
    [failure] = await silent.take()
    assert isinstance(failure, Failure)
    assert not failure.by_worker
    assert [abort.handle for abort in second.of(AbortRequest)] == [2]
    assert await answered.take() == [Run(0, [7])]


async def test_a_placement_under_way_when_the_connection_broke_counts_as_unanswered(rig):
    first, second = Wire(), Wire()
    one = rig(first, second)
    mailbox = one.submit(1)
    await one.settle()
    first.bring(frame(1, records=[Started(handle=Handle(1), num_cached_tokens=0)]))
    await one.settle()
    one.link.place(Handle(1), None)
    assert len(first.of(Place)) == 1
    first.bring(WorkerLost("broken"))
    await one.settle()
    items = await mailbox.take()
    assert isinstance(items[-1], Failure)


async def test_commands_given_while_the_connection_is_down_are_sent_after_it(rig):
    first, second = Wire(), Wire()
    one = rig(first, WorkerLost("refused"), second, rules=LinkRules(backoff_s=0.01))
    await one.settle()
    first.bring(WorkerLost("broken"))
    await one.settle()
    mailbox = one.submit(5)
    await asyncio.sleep(0.03)
    await one.settle()
    assert [submit.handle for submit in second.of(Submit)] == [5]
    second.bring(frame(1, handle=5, tokens=[7]))
    assert await mailbox.take() == [Run(0, [7])]


async def test_when_it_cannot_be_reached_again_every_request_sees_worker_lost(rig):
    first = Wire()
    one = rig(first)
    mailboxes = [one.submit(number) for number in (1, 2)]
    await one.settle()
    first.bring(WorkerLost("broken"))
    for mailbox in mailboxes:
        [failure] = await mailbox.take()
        assert isinstance(failure.error, WorkerLost)
    assert len(one.opener.hellos) == 1 + RULES.max_tries
    with pytest.raises(WorkerLost):
        one.submit(3)


async def test_an_error_record_ends_its_handle_with_the_named_error(rig):
    wire = Wire()
    one = rig(wire)
    mailbox = one.submit(1)
    await one.settle()
    wire.bring(frame(1, records=[Errored(handle=Handle(1), code="no_capacity", message="busy", retry_after_s=4.0)]))
    [failure] = await mailbox.take()
    assert failure.by_worker
    assert isinstance(failure.error, NoCapacity)
    assert failure.error.retry_after_s == 4.0


async def test_a_consumer_too_far_behind_is_cut_off_and_the_rest_go_on(rig):
    wire = Wire()
    one = rig(wire)
    slow = one.submit(1)
    await one.settle()
    wire.bring(frame(1, tokens=[7] * 8))
    wire.bring(frame(2, position=8, tokens=[7] * 8))
    await one.settle()
    items = await slow.take()
    assert items[0] == Run(0, [7] * 8)
    assert items[1].error.code == "aborted"
    assert [abort.handle for abort in wire.of(AbortRequest)] == [1]
    assert one.link.error is None


async def test_a_worker_that_reads_nothing_is_lost(rig):
    wire = Wire()
    one = rig(wire)
    mailbox = one.submit(1)
    await one.settle()
    wire.full = True
    one.submit(2)
    assert isinstance((await mailbox.take())[0].error, WorkerLost)


async def test_links_lose_only_workers_that_are_silent_on_both_sides():
    clock, wire = ManualClock(), Wire()
    links = Links(gateway=GATEWAY, opener=Wires(wire), clock=clock, rules=RULES, silence_s=3.0)
    link = links.ensure(WORKER)
    mailbox = link.submit(links.fresh_handle(), a_request(), None)
    for _ in range(10):
        await asyncio.sleep(0)
    clock.advance(2.9)
    wire.bring(frame(1, tokens=[7]))
    for _ in range(5):
        await asyncio.sleep(0)
    links.expired(WORKER.incarnation)
    clock.advance(2.9)
    links.sweep()
    assert link.error is None
    clock.advance(0.2)
    links.sweep()
    assert isinstance((await mailbox.take())[-1].error, WorkerLost)
    assert len(links) == 0
    await links.close()


async def test_a_departed_workers_link_ends_with_its_last_request():
    wire, told = Wire(), []
    links = Links(gateway=GATEWAY, opener=Wires(wire), clock=ManualClock(), rules=RULES, silence_s=3.0)
    links.on_lost(told.append)
    link = links.ensure(WORKER)
    handle = links.fresh_handle()
    link.submit(handle, a_request(), None)
    links.departed(WORKER.incarnation)
    links.sweep()
    assert link.error is None
    link.release(handle, "done")
    links.sweep()
    assert len(links) == 0
    await links.close()
    assert told == []


async def test_an_unreachable_worker_is_reported_once():
    told = []
    links = Links(gateway=GATEWAY, opener=Wires(), clock=ManualClock(), rules=RULES, silence_s=3.0)
    links.on_lost(told.append)
    links.ensure(WORKER)
    for _ in range(20):
        await asyncio.sleep(0)
    assert told == [WORKER]
    assert len(links) == 0
    await links.close()


async def test_a_worker_that_reads_nothing_loses_its_stream_so_that_it_gives_up_what_it_runs(rig):
    wire = Wire()
    r = rig(wire)
    first = r.submit(1)
    await r.settle()
    wire.full = True
    second = r.submit(2)
    for mailbox in (first, second):
        (failure,) = await mailbox.take()
        assert isinstance(failure, Failure)
    await r.settle()
    assert wire.closed
    assert r.task.done()
