"""Numbered frames, acknowledgement, replay, merging."""

import pytest

from core.clock import ManualClock
from core.errors import WorkerLost
from core.handover import TokenLogprobs
from core.ids import Handle, Incarnation
from core.stream import Finished, Logprobs, StreamHello
from decode_worker.streams import GatewayStream, GatewayStreams, StreamConfig

WORKER, GATEWAY = Incarnation("d" * 32), Incarnation("a" * 32)
H1, H2 = Handle(1), Handle(2)


def new_stream(**config):
    return GatewayStream(GATEWAY, StreamConfig(**config))


def hello(resume_after=-1, worker=WORKER, gateway=GATEWAY):
    return StreamHello(gateway=gateway, worker=worker, resume_after=resume_after)


def end(handle):
    return Finished(handle=handle, reason="stop", num_output_tokens=1)


def test_the_deltas_of_one_step_make_one_frame():
    stream = new_stream()
    stream.add_tokens(H1, 0, (10,))
    stream.add_tokens(H2, 4, (20,))
    frame = stream.next_frame()
    assert (frame.sequence, list(frame.handles), list(frame.positions), list(frame.counts), list(frame.tokens)) == (
        1,
        [1, 2],
        [0, 4],
        [1, 1],
        [10, 20],
    )
    assert stream.next_frame() is None


def test_steps_that_a_slow_gateway_missed_merge_into_one_frame():
    stream = new_stream()
    for position in range(3):
        stream.add_tokens(H1, position, (10 + position,))
        stream.add_tokens(H2, position, (20 + position,), (TokenLogprobs(token=20 + position, logprob=-1.0),))
    stream.add_record(end(H1))
    frame = stream.next_frame()
    assert list(frame.positions) == [0, 0]
    assert list(frame.counts) == [3, 3]
    assert list(frame.tokens) == [10, 11, 12, 20, 21, 22]
    (logprobs, finished) = frame.records
    assert isinstance(logprobs, Logprobs)
    assert [item.token for item in logprobs.items] == [20, 21, 22]
    assert finished == end(H1)


def test_unacknowledged_frames_are_sent_again_and_nothing_else():
    stream = new_stream()
    for position in range(4):
        stream.add_tokens(H1, position, (position,))
        assert stream.next_frame().sequence == position + 1
    stream.acknowledge(1)
    assert stream.can_resume(2)
    stream.rewind(2)
    stream.add_tokens(H1, 4, (4,))
    assert [list(stream.next_frame().tokens) for _ in range(3)] == [[2], [3], [4]]
    assert stream.next_frame() is None


def test_acknowledged_frames_are_gone():
    stream = new_stream()
    for position in range(3):
        stream.add_tokens(H1, position, (position,))
        stream.next_frame()
    stream.acknowledge(2)
    assert not stream.can_resume(1)
    assert stream.can_resume(2)
    assert stream.can_resume(3)
    assert not stream.can_resume(4)
    assert stream.num_unacked == 1


def test_an_acknowledgement_from_the_future_changes_nothing():
    stream = new_stream()
    stream.add_record(end(H1))
    stream.next_frame()
    stream.acknowledge(99)
    assert stream.num_unacked == 1


def test_a_full_window_holds_frames_back_and_merges_until_an_acknowledgement():
    stream = new_stream(max_unacked_frames=2)
    for position in range(5):
        stream.add_tokens(H1, position, (position,))
        stream.next_frame()
    assert stream.num_unacked == 2
    stream.acknowledge(1)
    assert list(stream.next_frame().tokens) == [2, 3, 4]


def test_an_aborted_handle_leaves_nothing_pending():
    stream = new_stream()
    stream.add_tokens(H1, 0, (1, 2))
    stream.add_tokens(H2, 0, (3,))
    stream.add_record(end(H1))
    stream.forget(H1)
    frame = stream.next_frame()
    assert list(frame.handles) == [2]
    assert frame.records == ()


def test_a_stream_overflows_by_tokens_not_sent():
    stream = new_stream(max_pending_tokens=3)
    stream.add_tokens(H1, 0, (1, 2, 3))
    assert not stream.overflows
    stream.add_tokens(H2, 0, (4,))
    assert stream.overflows
    stream.forget(H2)
    assert not stream.overflows


def test_remembered_handles_are_bounded():
    stream = new_stream(remembered_handles=2)
    for handle in (1, 2, 3):
        stream.remember_ended(Handle(handle))
    assert [stream.was_used(Handle(h)) for h in (1, 2, 3)] == [False, True, True]


def test_another_incarnation_of_the_worker_is_refused():
    streams = GatewayStreams(WORKER, StreamConfig(), ManualClock())
    with pytest.raises(WorkerLost):
        streams.open(hello(worker=Incarnation("e" * 32)))


def test_a_gateway_comes_back_to_its_stream_by_incarnation():
    streams = GatewayStreams(WORKER, StreamConfig(), ManualClock())
    first, _ = streams.open(hello())
    streams.detach(first, first.attach())
    again, replaced = streams.open(hello(resume_after=0))
    assert again is first
    assert replaced is None
    other, _ = streams.open(hello(gateway=Incarnation("b" * 32)))
    assert other is not first


def test_a_fresh_hello_of_a_known_gateway_replaces_its_stream():
    streams = GatewayStreams(WORKER, StreamConfig(), ManualClock())
    first, _ = streams.open(hello())
    attachment = first.attach()
    second, replaced = streams.open(hello())
    assert replaced is first
    assert second is not first
    assert attachment.superseded.is_set()


def test_a_second_connection_supersedes_the_first_and_its_end_counts_for_nothing():
    clock = ManualClock()
    streams = GatewayStreams(WORKER, StreamConfig(replay_s=3), clock)
    stream, _ = streams.open(hello())
    old = stream.attach()
    streams.open(hello(resume_after=0))
    new = stream.attach()
    assert old.superseded.is_set()
    streams.detach(stream, old)
    clock.advance(10)
    assert streams.expire() == []
    streams.detach(stream, new)
    clock.advance(2.9)
    assert streams.expire() == []
    clock.advance(0.1)
    assert streams.expire() == [stream]
    with pytest.raises(WorkerLost):
        streams.open(hello(resume_after=0))
