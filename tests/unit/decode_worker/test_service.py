"""What a gateway sees of a decode worker: hand-overs, failures, aborts, duplicates, drains, broken connections."""

import asyncio

import msgspec
import numpy as np
import pytest

from core.errors import (
    Aborted,
    DeadlineExceeded,
    InvariantError,
    LeaseLost,
    NeverFits,
    TransferFailed,
    WorkerLost,
)
from core.handover import TokenLogprobs
from core.stream import AbortRequest, Ack, Errored, Finished, NeedPrefill, Place, Started
from decode_worker.streams import StreamConfig
from engine.events import FailedHere, StepEvents
from tests.fakes.decode import P1, P2, DecodeRig, InProcessGateway, settle
from tests.fakes.engine import ask, reply

PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture
async def rig():
    made = DecodeRig()
    yield made
    await made.tasks.close()


async def connected(rig, **options):
    gateway = InProcessGateway(rig.service, **options)
    gateway.connect()
    await settle()
    return gateway


async def test_a_local_request_streams_its_tokens_and_ends_once(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT))
    await rig.run_dry()
    assert gateway.tokens[1] == reply(PROMPT, 5)
    assert [type(r) for r in gateway.records[1]] == [Started, Finished]
    assert gateway.terminal(1) == Finished(handle=1, reason="length", num_output_tokens=5)
    assert rig.engine.audit() == []


async def test_the_first_token_is_sent_at_final_and_the_hand_over_continues_it(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    pull = await rig.puller.next()
    assert (pull.address, pull.prefix_tokens) == (P1.address, 0)
    pull.final(cached=4, logprobs=(TokenLogprobs(token=1, logprob=-0.5),))
    await settle()
    assert gateway.tokens[1] == reply(PROMPT, 1)
    assert gateway.of(1, Started) == [Started(handle=1, num_cached_tokens=4, prefill_worker="prefill-1")]
    assert len(gateway.logprobs[1]) == 1
    pull.done()
    await rig.run_dry()
    assert gateway.of(1, Started)[1:] == [
        Started(handle=1, num_cached_tokens=4, prefill_worker="prefill-1", bytes_pulled=64)
    ]
    assert gateway.tokens[1] == reply(PROMPT, 5)
    assert gateway.terminal(1).recomputed_tokens == 0
    assert rig.engine.audit() == []


async def test_one_frame_per_step_carries_the_deltas_of_all_requests(rig):
    gateway = await connected(rig)
    for handle in range(8):
        gateway.submit(handle, ask((handle + 1, 2)))
    await settle()
    before = len(gateway.frames)
    rig.engine.step()
    await settle()
    assert len(gateway.frames) == before + 1
    assert sorted(gateway.frames[-1].handles) == list(range(8))


async def test_a_run_of_tokens_is_one_delta_and_its_log_probabilities_come_once(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT))
    gateway.submit(2, ask(PROMPT))
    await settle()
    rig.engine.step()
    await settle()
    first, second = rig.engine.seqs
    items = tuple(TokenLogprobs(token=token, logprob=-float(token)) for token in (7, 8, 9))
    rig.engine._emit(
        seqs=np.array([first, first, first, second], np.int64),
        positions=np.array([1, 2, 3, 1], np.int32),
        tokens=np.array([7, 8, 9, 5], np.int32),
        logprobs={first: items},
    )
    await settle()
    frame = gateway.frames[-1]
    assert dict(zip(frame.handles, frame.counts, strict=True)) == {1: 3, 2: 1}
    assert gateway.tokens[1][1:] == [7, 8, 9]
    assert gateway.logprobs[1] == list(items)


async def test_a_first_token_that_ends_the_request_is_answered_at_once_and_its_pages_still_land(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT, max_tokens=1), P1)
    pull = await rig.puller.next()
    pull.final(finish="length")
    await settle()
    assert gateway.terminal(1) == Finished(handle=1, reason="length", num_output_tokens=1)
    pull.done()
    await settle()
    assert rig.engine.committed
    assert rig.engine.audit() == []


@pytest.mark.parametrize(
    "error", [WorkerLost("gone"), LeaseLost("lapsed"), TransferFailed("no bytes"), InvariantError("their bug")]
)
async def test_a_prefill_worker_lost_before_final_is_replaced_by_the_gateways_choice(rig, error):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    (await rig.puller.next()).fail(error)
    await settle()
    assert gateway.of(1, NeedPrefill) == [
        NeedPrefill(handle=1, failed="prefill-1", code=error.code, message=error.message)
    ]
    gateway.send(Place(handle=1, prefill=P2))
    pull = await rig.puller.next(2)
    assert pull.address == P2.address
    pull.final()
    pull.done()
    await rig.run_dry()
    assert gateway.tokens[1] == reply(PROMPT, 5)
    assert isinstance(gateway.terminal(1), Finished)
    assert rig.engine.audit() == []


async def test_placed_nowhere_the_prompt_is_computed_here(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    (await rig.puller.next()).fail(WorkerLost("gone"))
    await settle()
    gateway.send(Place(handle=1, prefill=None))
    await rig.run_dry()
    assert gateway.tokens[1] == reply(PROMPT, 5)
    assert isinstance(gateway.terminal(1), Finished)


async def test_no_answer_to_need_prefill_ends_the_request_retryably():
    rig = DecodeRig(place_timeout_s=0.02)
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    (await rig.puller.next()).fail(WorkerLost("gone"))
    assert (await gateway.ended(1)).code == "no_worker"
    assert rig.engine.audit() == []


@pytest.mark.parametrize("error", [NeverFits("too long"), DeadlineExceeded("late")])
async def test_errors_of_the_request_itself_are_not_tried_elsewhere(rig, error):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    (await rig.puller.next()).fail(error)
    assert (await gateway.ended(1)).code == error.code
    assert gateway.of(1, NeedPrefill) == []


async def test_a_prefill_worker_lost_after_final_is_invisible_to_the_client(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    pull = await rig.puller.next()
    pull.final(cached=2)
    await settle()
    pull.fail(WorkerLost("gone"))
    await rig.run_dry()
    assert gateway.tokens[1] == reply(PROMPT, 5)
    assert len(gateway.of(1, Started)) == 1
    assert gateway.of(1, NeedPrefill) == []
    end = gateway.terminal(1)
    assert (end.reason, end.num_output_tokens, end.recomputed_tokens) == ("length", 5, len(PROMPT) + 1)
    assert rig.engine.audit() == []


async def test_a_resumed_request_continues_at_its_output_position(rig):
    whole = reply(PROMPT, 6)
    request = msgspec.structs.replace(
        ask(PROMPT, max_tokens=6), token_ids=PROMPT + tuple(whole[:3]), num_cached_tokens=1, attempt=1
    )
    gateway = await connected(rig)
    gateway.base = lambda handle: 3
    gateway.submit(1, request, P1)
    pull = await rig.puller.next()
    pull.final(cached=4)
    pull.done()
    await rig.run_dry()
    assert gateway.tokens[1] == whole[3:]
    assert gateway.of(1, Started)[0].num_cached_tokens == 1
    assert gateway.terminal(1).num_output_tokens == 6


@pytest.mark.parametrize("moment", ["local", "booking", "pulling", "after final", "need prefill", "running"])
async def test_an_abort_frees_everything_and_no_record_answers_it(moment):
    rig = DecodeRig(rows=0 if moment == "booking" else 8)
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT, max_tokens=50), None if moment == "local" else P1)
    await settle()
    if moment not in ("local", "booking"):
        pull = await rig.puller.next()
        if moment in ("after final", "running"):
            pull.final()
        if moment == "need prefill":
            pull.fail(WorkerLost("gone"))
        if moment == "running":
            pull.done()
            await settle()
            rig.engine.step()
        await settle()
    assert rig.ledger.num_live == 1
    gateway.send(AbortRequest(handle=1))
    gateway.send(AbortRequest(handle=1))
    await settle()
    assert rig.engine.audit() == []
    assert rig.ledger.num_live == 0
    assert gateway.terminal(1) is None
    assert [pull.cancelled for pull in rig.puller.pulls].count(True) == (moment in ("pulling", "after final"))
    await rig.tasks.close()


async def test_a_request_that_fails_in_the_engine_while_it_is_pulled_ends_once(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    pull = await rig.puller.next()
    await settle()
    rig.engine.fail(pull.seq, DeadlineExceeded("too late"))
    assert (await gateway.ended(1)).code == "deadline_exceeded"
    await settle()
    assert pull.cancelled
    assert rig.engine.audit() == []


async def test_a_commit_that_the_engine_refuses_frees_the_pages_and_ends_the_request(rig):
    rig.engine.commit_error = TransferFailed("a page is missing")
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    pull = await rig.puller.next()
    pull.final()
    pull.done()
    assert (await gateway.ended(1)).code == "transfer_failed"
    assert rig.engine.audit() == []


async def test_a_pull_that_fails_because_the_deadline_passed_says_so(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT, timeout_s=5.0), P1)
    pull = await rig.puller.next()
    rig.clock.advance(5.0)
    pull.fail(Aborted("the request ended before its pages arrived"))
    assert (await gateway.ended(1)).code == "deadline_exceeded"


async def test_a_refusal_of_the_engine_ends_the_request_with_its_code(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(range(1, 250)), P1)
    gateway.submit(2, ask(range(1, 250)))
    assert (await gateway.ended(1)).code == "context_length_exceeded"
    assert (await gateway.ended(2)).code == "context_length_exceeded"


async def test_a_handle_submitted_twice_runs_once(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT))
    gateway.submit(1, ask((9, 9, 9)))
    await rig.run_dry()
    gateway.submit(1, ask(PROMPT))
    await rig.run_dry()
    assert gateway.tokens[1] == reply(PROMPT, 5)
    assert len(gateway.of(1, Finished)) == 1
    assert rig.service.statistics()["duplicate_submits_total"] == 2


async def test_auto_mode_gives_a_booking_back_when_little_is_uncached():
    rig = DecodeRig(mode="auto", threshold=2, prefix_tokens=4)
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    await rig.run_dry()
    assert rig.puller.pulls == []
    assert gateway.tokens[1] == reply(PROMPT, 5)
    assert rig.engine.audit() == []


async def test_a_broken_connection_loses_and_repeats_nothing(rig):
    gateway = await connected(rig, acks=False)
    gateway.submit(1, ask(PROMPT, max_tokens=9))
    await settle()
    for _ in range(3):
        rig.engine.step()
        await settle()
    gateway.send(Ack(sequence=1))
    await settle()
    # The last two frames were sent, but the gateway never saw them.
    del gateway.tokens[1][1:]
    gateway.last = 1
    await gateway.cut()
    rig.engine.step()
    rig.engine.step()
    gateway.connect(resume_after=1)
    await rig.run_dry()
    assert gateway.tokens[1] == reply(PROMPT, 9)
    assert isinstance(gateway.terminal(1), Finished)


async def test_a_connection_that_was_superseded_takes_no_frame_from_its_successor(rig):
    stuck = await connected(rig)
    stuck.submit(1, ask(PROMPT, max_tokens=9))
    await settle()
    stuck.readable.clear()
    for _ in range(3):
        rig.engine.step()
        await settle()
    successor = InProcessGateway(rig.service)
    successor.connect(resume_after=0)
    # The old connection's send returns in the very moment in which the new one takes over.
    stuck.readable.set()
    await rig.run_dry()
    assert successor.tokens[1] == reply(PROMPT, 9)
    assert isinstance(successor.terminal(1), Finished)


async def test_a_gateway_that_stays_away_loses_its_requests_and_only_those(rig):
    gateway, other = await connected(rig), await connected(rig, gateway="b" * 32)
    gateway.submit(1, ask(PROMPT, max_tokens=50))
    gateway.submit(2, ask(PROMPT), P1)
    other.submit(1, ask(PROMPT))
    await rig.puller.next()
    await gateway.cut()
    rig.clock.advance(2.9)
    rig.service.expire()
    assert rig.ledger.num_live == 3
    rig.clock.advance(0.2)
    rig.service.expire()
    await settle()
    assert rig.ledger.num_live == 1
    await rig.run_dry()
    assert isinstance(other.terminal(1), Finished)
    assert rig.engine.audit() == []
    gateway.connect(resume_after=gateway.last)
    with pytest.raises(WorkerLost):
        await gateway.connection


async def test_a_slow_gateway_gets_merged_frames_and_past_the_bound_loses_its_newest_request():
    rig = DecodeRig(stream=StreamConfig(max_pending_tokens=20))
    gateway = await connected(rig)
    gateway.readable.clear()
    for handle in (1, 2):
        gateway.submit(handle, ask(PROMPT, max_tokens=18))
    await rig.run_dry()
    gateway.readable.set()
    await settle()
    assert gateway.tokens[1] == reply(PROMPT, 18)
    assert isinstance(gateway.terminal(1), Finished)
    assert gateway.terminal(2).code == "no_capacity"
    assert gateway.tokens.get(2, []) == reply(PROMPT, 18)[: len(gateway.tokens.get(2, []))]
    assert len(gateway.frames) < 8
    assert rig.engine.audit() == []


async def test_a_drain_refuses_new_requests_and_finishes_the_running_ones(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT))
    await settle()
    rig.service.begin_drain()
    draining = asyncio.create_task(rig.service.finished())
    gateway.submit(2, ask(PROMPT))
    assert (await gateway.ended(2)).code == "draining"
    assert not draining.done()
    await rig.run_dry()
    await draining
    assert gateway.tokens[1] == reply(PROMPT, 5)
    assert isinstance(gateway.terminal(1), Finished)


async def test_at_the_end_of_the_drain_budget_requests_are_handed_back(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT, max_tokens=50))
    gateway.submit(2, ask(PROMPT, max_tokens=50), P1)
    await rig.puller.next()
    rig.engine.step()
    rig.service.begin_drain()
    await rig.service.hand_back()
    assert isinstance(gateway.terminal(1), Errored)
    assert {gateway.terminal(h).code for h in (1, 2)} == {"draining"}
    await settle()
    assert rig.engine.audit() == []


async def test_a_stream_that_says_hello_twice_is_closed(rig):
    gateway = await connected(rig)
    gateway.connect(resume_after=0)
    await settle()
    assert rig.streams.statistics()["gateway_streams_attached"] == 1


async def test_a_call_that_is_cancelled_while_it_ends_leaves_no_stream_attached(rig):
    """gRPC cancels a call whose frames have just ended; the stream must expire all the same."""
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT))
    await settle()
    gateway._outbox.put_nowait(None)  # the frames end ...
    for _ in range(10):
        gateway.connection.cancel()  # ... and the call is cancelled, again and again
        await asyncio.sleep(0)
    await asyncio.gather(gateway.connection, return_exceptions=True)
    assert rig.streams.statistics()["gateway_streams_attached"] == 0
    rig.clock.advance(10.0)
    rig.service.expire()
    assert rig.ledger.num_live == 0
    await rig.run_dry()
    assert rig.engine.audit() == []


async def test_a_sequence_that_fails_after_its_first_token_ended_the_request_is_forgotten(rig):
    gateway = await connected(rig)
    gateway.submit(1, ask(PROMPT), P1)
    pull = await rig.puller.next()
    pull.final(finish="stop")
    await settle()
    assert gateway.terminal(1).reason == "stop"
    rig.service.on_step(StepEvents(failed=(FailedHere(pull.seq, DeadlineExceeded("too late")),)))
    assert rig.ledger.num_bound == 0
    assert gateway.terminal(1).reason == "stop"
    pull.fail(Aborted("its sequence is gone"))
    await rig.run_dry()
    assert rig.engine.audit() == []
