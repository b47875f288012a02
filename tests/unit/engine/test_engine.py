import numpy as np
import pytest

from core.errors import Aborted, BadRequest, ContextExceeded, DeadlineExceeded, NeverFits, NoCapacity, TransferFailed
from core.ids import Incarnation
from core.lifecycle import State
from core.request import FinishReason, MmItem
from engine.engine import Engine
from engine.port import Booking, DestinationWork, LandingPages, LocalWork, SourceWork
from engine.scheduler.row_table import RowState
from tests.fakes.engine_rig import EOS, Rig, request_of
from tests.fakes.kv_runner import reply

PROMPT = list(range(1, 24))


def conforms(engine: Engine) -> tuple[LocalWork, SourceWork, DestinationWork]:
    return engine, engine, engine


def kinds(rig):
    return rig.holdings.rows.state[rig.holdings.rows.state > RowState.FENCED].tolist()


# Local work.


@pytest.mark.parametrize("chunk", [4, 8, 64])
def test_a_text_does_not_depend_on_how_the_prompt_is_cut(chunk):
    rig = Rig(chunk_tokens=chunk)
    seq = rig.submit(PROMPT, 12)
    rig.run()
    assert rig.sink.tokens[seq] == reply(PROMPT, 12)
    assert rig.sink.started[seq].num_cached_tokens == 0
    assert rig.sink.finished[seq].reason is FinishReason.LENGTH
    rig.assert_nothing_held()


def test_sequences_in_one_batch_do_not_disturb_each_other():
    rig = Rig()
    prompts = [[10 + i] * (3 + 5 * i) for i in range(6)]
    seqs = [rig.submit(prompt, 9, seed=i) for i, prompt in enumerate(prompts)]
    rig.run()
    assert [rig.sink.tokens[seq] for seq in seqs] == [reply(prompt, 9, i) for i, prompt in enumerate(prompts)]


def test_a_second_prompt_reuses_pages_of_the_first_and_says_the_same():
    rig = Rig()
    first = rig.submit(PROMPT, 5)
    rig.run()
    rig.runner.computed.clear()
    second = rig.submit(PROMPT, 5)
    rig.run()
    assert rig.sink.tokens[second] == rig.sink.tokens[first]
    assert rig.sink.started[second].num_cached_tokens == 20
    assert rig.runner.computed[0][1:] == (20, 23)


def test_a_wholly_cached_prompt_still_computes_its_last_token():
    rig = Rig()
    rig.submit(PROMPT[:16], 3)
    rig.run()
    second = rig.submit(PROMPT[:16], 3)
    rig.run()
    assert rig.sink.started[second].num_cached_tokens == 12
    assert rig.sink.tokens[second] == reply(PROMPT[:16], 3)


def test_generated_pages_are_reused_by_the_next_turn_of_a_conversation():
    rig = Rig()
    first = rig.submit(PROMPT, 10)
    rig.run()
    turn = [*PROMPT, *rig.sink.tokens[first], 5, 6]
    second = rig.submit(turn, 4)
    rig.run()
    assert rig.sink.started[second].num_cached_tokens == 32
    assert rig.sink.tokens[second] == reply(turn, 4)


@pytest.mark.parametrize("fields", [{"tenant": "other"}, {"cache_salt": "x"}])
def test_another_tenant_or_salt_finds_nothing_cached(fields):
    rig = Rig()
    rig.submit(PROMPT, 5)
    rig.run()
    second = rig.submit(PROMPT, 5, **fields)
    rig.run()
    assert rig.sink.started[second].num_cached_tokens == 0


def test_hashes_of_the_gateway_and_our_own_name_the_same_pages():
    rig = Rig()
    hasher = rig.holdings.chains._hasher
    rig.submit(PROMPT, 5, page_hashes=hasher.extend(hasher.root(), PROMPT))
    rig.run()
    second = rig.submit(PROMPT, 5)
    rig.run()
    assert rig.sink.started[second].num_cached_tokens == 20


def test_a_model_with_row_state_reuses_no_pages_and_tells_of_none():
    rig = Rig(ring_tokens=5)
    for _ in range(2):
        seq = rig.submit(PROMPT, 6)
        rig.run()
        assert rig.sink.tokens[seq] == reply(PROMPT, 6, ring_tokens=5)
        assert rig.sink.started[seq].num_cached_tokens == 0
    assert rig.sink.kv_events == []


def test_kv_events_and_snapshot_agree():
    rig = Rig()
    rig.submit(PROMPT, 5)
    rig.run()
    stored = [name for event in rig.sink.kv_events for name in event.hashes]
    snapshot = rig.engine.kv_snapshot(Incarnation("i"))
    assert sorted(snapshot.hashes) == sorted(stored)
    assert len(stored) == (len(PROMPT) + 4) // 4
    assert snapshot.sequence > 0


def test_a_stop_token_ends_the_text_and_is_told():
    rig = Rig()
    wanted = reply(PROMPT, 40)
    stop = wanted[7]
    seq = rig.submit(PROMPT, 40, stop_token_ids=(stop,))
    rig.run()
    assert rig.sink.tokens[seq] == wanted[: wanted.index(stop) + 1]
    assert rig.sink.finished[seq].reason is FinishReason.STOP


def test_the_step_after_a_stop_is_dropped_and_rows_that_end_by_length_have_none():
    rig = Rig()
    wanted = reply(PROMPT, 40)
    rig.submit(PROMPT, 40, stop_token_ids=(wanted[5],))
    rig.run()
    decoded = [entry for entry in rig.runner.computed if entry[1] >= len(PROMPT)]
    assert len(decoded) == wanted.index(wanted[5]) + 1
    rig = Rig()
    rig.submit(PROMPT, 6)
    rig.run()
    assert len([entry for entry in rig.runner.computed if entry[1] >= len(PROMPT)]) == 5


def test_end_of_text_ends_unless_it_is_ignored():
    prompt = next(p for p in ([i, i + 1] for i in range(90)) if EOS in reply(p, 60))
    wanted = reply(prompt, 60)
    rig = Rig()
    stops, goes_on = rig.submit(prompt, 60, ignore_eos=False), rig.submit(prompt, 60)
    rig.run()
    assert rig.sink.tokens[stops] == wanted[: wanted.index(EOS) + 1]
    assert rig.sink.tokens[goes_on] == wanted


def test_the_context_length_ends_a_text_by_length():
    rig = Rig(max_positions=30)
    seq = rig.submit(PROMPT, 100)
    rig.run()
    assert rig.sink.finished[seq].num_output_tokens == 30 - len(PROMPT)
    assert rig.sink.finished[seq].reason is FinishReason.LENGTH


def test_a_sequence_that_outgrows_the_pool_fails_and_keeps_its_output():
    rig = Rig(num_pages=9)
    seq = rig.submit(PROMPT, 100)
    rig.run()
    assert isinstance(rig.sink.failed[seq].error, ContextExceeded)
    assert rig.sink.tokens[seq] == reply(PROMPT, 32 - len(PROMPT) + 1)
    rig.assert_nothing_held()


def test_a_resumed_sequence_goes_on_where_it_was():
    rig = Rig()
    wanted = reply(PROMPT, 12)
    seq = rig.submit(PROMPT, 12, outputs=wanted[:7], num_cached_tokens=8)
    rig.run()
    assert rig.sink.tokens[seq] == wanted[7:]
    assert rig.sink.first_position[seq] == 7
    assert rig.sink.finished[seq].num_output_tokens == 12
    assert rig.sink.started[seq].num_cached_tokens == 8


@pytest.mark.parametrize(("outputs", "reason"), [(12, FinishReason.LENGTH), (8, FinishReason.STOP)])
def test_a_resumed_sequence_that_is_over_ends_without_a_step(outputs, reason):
    rig = Rig()
    wanted = reply(PROMPT, 12)
    seq = rig.submit(PROMPT, 12, outputs=wanted[:outputs], stop_token_ids=(wanted[7],))
    rig.run()
    assert rig.sink.finished[seq].reason is reason
    assert rig.plans == 0


def test_logprobs_come_with_every_token_of_who_asked():
    rig = Rig()
    real = rig.runner.collect

    def collect(handle):
        result = real(handle)
        n = len(result.tokens)
        return type(result)(
            step=result.step,
            tokens=result.tokens,
            count=result.count,
            logprobs=np.full((n, 1), -0.5, np.float32),
            top_tokens=np.tile(np.array([7, 8, -1], np.int32), (n, 1, 1)),
            top_logprobs=np.tile(np.array([-0.5, -1.0, np.nan], np.float32), (n, 1, 1)),
        )

    rig.runner.collect = collect
    one, three, none = (rig.submit(PROMPT[:4], 5, num_logprobs=n) for n in (1, 3, -1))
    rig.run()
    assert [item.token for item in rig.sink.logprobs[one]] == rig.sink.tokens[one]
    assert {item.top for item in rig.sink.logprobs[one]} == {((7, -0.5),)}
    assert {item.top for item in rig.sink.logprobs[three]} == {((7, -0.5), (8, -1.0))}
    assert none not in rig.sink.logprobs


# Ingress.


def test_what_can_never_run_is_refused_with_the_reason():
    rig = Rig(num_pages=9, max_positions=4096)
    with pytest.raises(NeverFits, match="at most 31"):
        rig.submit([1] * 32, 1)
    rig.submit([1] * 31, 1)
    with pytest.raises(BadRequest, match="vocabulary"):
        rig.submit([97], 1)
    with pytest.raises(BadRequest, match="prompt"):
        rig.submit([1], 1, prompt_logprobs=True)
    with pytest.raises(BadRequest, match="images"):
        rig.submit([1], 1, mm_items=(MmItem(digest=b"", start=0, end=1),))
    with pytest.raises(BadRequest, match="output tokens"):
        rig.engine.submit_source(request_of([1], 1, outputs=(5,)), 1e9)


def test_the_largest_prompt_that_is_accepted_runs():
    rig = Rig(num_pages=9)
    seq = rig.submit([1] * 31, 1)
    rig.run()
    assert rig.sink.tokens[seq] == reply([1] * 31, 1)


def test_a_full_queue_is_answered_with_a_delay():
    rig = Rig(num_rows=1, max_waiting=2)
    rig.submit(PROMPT, 30)
    rig.turn()
    rig.submit(PROMPT, 3)
    rig.engine.book(request_of(PROMPT, 3), 1e9, lambda result: None)
    with pytest.raises(NoCapacity) as refused:
        rig.submit(PROMPT, 3)
    assert 0.5 <= refused.value.retry_after_s <= 30


def test_deadlines_end_waiting_running_and_booking_sequences():
    rig = Rig(num_rows=1)
    answers = []
    running = rig.submit(PROMPT, 50, deadline=105.0)
    rig.turn()
    waiting = rig.submit(PROMPT, 50, deadline=104.0)
    rig.engine.book(request_of(PROMPT, 3), 103.0, answers.append)
    for _ in range(5):
        rig.turn()
    rig.clock.advance(3.5)
    rig.turn()
    assert isinstance(answers[0], DeadlineExceeded)
    rig.clock.advance(2.0)
    rig.run()
    assert {type(rig.sink.failed[seq].error) for seq in (running, waiting)} == {DeadlineExceeded}
    rig.assert_nothing_held()


def test_bookings_do_not_starve_a_prompt_that_waits():
    rig = Rig(num_rows=1, max_bypass=3)
    rig.submit([5] * 4, 6)
    rig.turn()
    waiting = rig.submit(PROMPT, 3)
    booked = []
    for _ in range(30):
        if len(booked) < 20:
            rig.engine.book(request_of(PROMPT, 3), 1e9, booked.append)
        rig.turn()
        for booking in booked:
            rig.engine.abort(booking.seq)
    assert waiting in rig.sink.started
    assert len(booked) >= 3


def test_load_reports_what_waits_runs_and_is_free():
    rig = Rig(num_rows=2, chunk_tokens=8)
    rig.submit(PROMPT[:6], 30)
    rig.turn()
    rig.turn()
    rig.submit(PROMPT[6:], 3)
    rig.submit([9] * 8, 3)
    load = rig.engine.load()
    assert (load.state, load.rows_total, load.rows_used) == (State.READY, 2, 1)
    assert (load.waiting_requests, load.waiting_tokens, load.running_requests) == (2, 17 + 8, 1)
    rig.turn()
    assert rig.engine.load().waiting_tokens == 17 + 8
    assert load.pages_total == 63
    assert load.pages_free == 63 - 2
    rig.run()
    assert rig.engine.load().step_ms == pytest.approx(1.0)


# Aborts.


def test_an_abort_frees_a_sequence_in_any_state_within_a_step():
    rig = Rig(num_rows=3)
    running = rig.submit(PROMPT, 50)
    held = rig.engine.submit_source(request_of(PROMPT[:9], 5), 1e9)
    rig.run_while(lambda: held not in rig.sink.prefilled or running not in rig.sink.started)
    computing = rig.submit([7] * 40, 5)
    rig.turn()
    waiting = rig.submit([8] * 4, 5)
    answers = []
    booking = rig.engine.book(request_of(PROMPT, 5), 1e9, answers.append)
    rig.turn()
    assert sorted(kinds(rig)) == [RowState.PREFILLING, RowState.RUNNING, RowState.HELD]
    for seq in (running, held, computing, waiting, booking, 999):
        rig.engine.abort(seq)
        rig.check()
    assert isinstance(answers[0], Aborted)
    rig.turn()
    assert rig.holdings.pool.num_fenced == 0
    rig.assert_nothing_held()
    assert not rig.sink.failed
    assert not rig.sink.finished


def test_an_aborted_sequence_says_nothing_more():
    rig = Rig()
    seq = rig.submit(PROMPT, 50)
    rig.run_while(lambda: len(rig.sink.tokens[seq]) < 5)
    rig.engine.abort(seq)
    before = list(rig.sink.tokens[seq])
    rig.run()
    assert rig.sink.tokens[seq] == before


# Sources.


def test_a_source_announces_whole_pages_then_the_rest_and_is_held_until_release():
    rig = Rig(chunk_tokens=8)
    seq = rig.engine.submit_source(request_of(PROMPT, 9), 1e9)
    rig.run()
    assert [(c.start, c.end) for c in rig.sink.chunks[seq]] == [(0, 8), (8, 16), (16, 23)]
    done = rig.sink.prefilled[seq]
    assert (done.num_tokens, done.first_tokens, done.finish) == (23, tuple(reply(PROMPT, 1)), None)
    assert rig.sink.tokens[seq] == []
    assert rig.engine.epochs_unchanged(seq)
    assert rig.idle_pages == 63 - 6
    rig.engine.release(seq)
    assert not rig.engine.epochs_unchanged(seq)
    rig.assert_nothing_held()


def test_cached_pages_of_a_source_are_announced_before_anything_is_computed():
    rig = Rig(chunk_tokens=8)
    rig.submit(PROMPT[:16], 1)
    rig.run()
    seq = rig.engine.submit_source(request_of(PROMPT, 9), 1e9)
    rig.runner.computed.clear()
    rig.turn()
    assert [(c.start, c.end) for c in rig.sink.chunks[seq]] == [(0, 16)]
    assert rig.runner.computed == []
    rig.run()
    assert rig.sink.prefilled[seq].num_cached_tokens == 16


@pytest.mark.parametrize(
    ("fields", "finish"), [({"max_tokens": 1}, FinishReason.LENGTH), ({"stop": True}, FinishReason.STOP)]
)
def test_a_source_says_when_its_first_token_ends_the_request(fields, finish):
    rig = Rig()
    stop = tuple(reply(PROMPT, 1)) if "stop" in fields else ()
    seq = rig.engine.submit_source(request_of(PROMPT, fields.get("max_tokens", 9), stop_token_ids=stop), 1e9)
    rig.run()
    assert rig.sink.prefilled[seq].finish is finish


def test_a_released_source_leaves_its_full_pages_in_the_cache():
    rig = Rig()
    rig.engine.release(rig.engine.submit_source(request_of(PROMPT, 9), 1e9))
    seq = rig.engine.submit_source(request_of(PROMPT, 9), 1e9)
    rig.run()
    rig.engine.release(seq)
    assert rig.holdings.tree.num_evictable == 5


def test_a_held_source_outlives_its_deadline_but_a_waiting_one_does_not():
    rig = Rig(num_rows=1)
    held = rig.engine.submit_source(request_of(PROMPT, 9), 101.0)
    late = rig.engine.submit_source(request_of(PROMPT, 9), 101.0)
    rig.run()
    rig.clock.advance(5)
    rig.run()
    assert held in rig.sink.prefilled
    assert isinstance(rig.sink.failed[late].error, DeadlineExceeded)
    assert rig.engine.epochs_unchanged(held)


# Destinations.


def book(rig, request):
    answers = []
    seq = rig.engine.book(request, 1e9, answers.append)
    rig.turn()
    return seq, answers


def write(rig, request, landing):
    size = rig.config.page_tokens
    for position in range(landing.start, landing.end):
        page = landing.pages[position // size - landing.start // size]
        rig.runner.pages[page, position % size] = (request.token_ids[position], position)


def land(rig, seq, request, start, end):
    answers = []
    rig.engine.land(seq, start, end, answers.append)
    rig.turn()
    assert isinstance(answers[0], LandingPages)
    write(rig, request, answers[0])
    return answers[0]


def test_a_landed_sequence_goes_on_like_a_local_one():
    rig = Rig()
    request = request_of(PROMPT, 12)
    seq, answers = book(rig, request)
    assert answers == [Booking(seq, 0, answers[0].row)]
    assert rig.holdings.promised_pages == 6
    land(rig, seq, request, 0, 8)
    assert rig.holdings.promised_pages == 4
    land(rig, seq, request, 8, 23)
    wanted = reply(PROMPT, 12)
    rig.engine.commit(seq, wanted[:1], (), None, 0)
    rig.run()
    assert rig.sink.tokens[seq] == wanted[1:]
    assert rig.sink.first_position[seq] == 1
    assert rig.sink.finished[seq].num_output_tokens == 12
    assert seq not in rig.sink.started
    assert rig.engine.statistics()["recomputed_tokens"] == 0
    rig.assert_nothing_held()


def test_a_booking_names_the_prefix_that_is_here_and_lands_only_the_rest():
    rig = Rig()
    rig.submit(PROMPT[:12], 1)
    rig.run()
    request = request_of(PROMPT, 12)
    seq, answers = book(rig, request)
    assert answers[0].prefix_tokens == 12
    landing = land(rig, seq, request, 8, 23)
    assert (landing.start, landing.end, len(landing.pages)) == (12, 23, 3)
    rig.engine.commit(seq, reply(PROMPT, 1), (), None, 12)
    rig.run()
    assert rig.sink.tokens[seq] == reply(PROMPT, 12)[1:]


def test_landing_again_gives_the_same_pages():
    rig = Rig()
    request = request_of(PROMPT, 12)
    seq, _ = book(rig, request)
    assert land(rig, seq, request, 0, 8) == land(rig, seq, request, 0, 8)


def test_a_first_token_that_ends_the_request_ends_it_at_commit():
    rig = Rig()
    request = request_of(PROMPT, 1)
    seq, _ = book(rig, request)
    land(rig, seq, request, 0, 23)
    rig.engine.commit(seq, reply(PROMPT, 1), (), FinishReason.LENGTH, 0)
    rig.turn()
    assert rig.sink.finished[seq].num_output_tokens == 1
    rig.assert_nothing_held()
    assert rig.holdings.tree.num_evictable == 5


def test_the_engine_ends_a_landed_sequence_even_if_the_source_did_not_say_so():
    rig = Rig()
    request = request_of(PROMPT, 9, stop_token_ids=tuple(reply(PROMPT, 1)))
    seq, _ = book(rig, request)
    land(rig, seq, request, 0, 23)
    rig.engine.commit(seq, reply(PROMPT, 1), (), None, 0)
    rig.turn()
    assert rig.sink.finished[seq].reason is FinishReason.STOP


def test_a_commit_without_all_pages_is_refused_and_changes_nothing():
    rig = Rig()
    request = request_of(PROMPT, 12)
    seq, _ = book(rig, request)
    land(rig, seq, request, 0, 8)
    with pytest.raises(TransferFailed, match="2 of 6 pages"):
        rig.engine.commit(seq, (1,), (), None, 0)
    land(rig, seq, request, 8, 23)
    for first_tokens in ((), (1, 2)):
        with pytest.raises(TransferFailed, match="first tokens"):
            rig.engine.commit(seq, first_tokens, (), None, 0)
    rig.engine.drop(seq, ())
    with pytest.raises(Aborted):
        rig.engine.commit(seq, (1,), (), None, 0)
    rig.assert_nothing_held()


def test_wishes_out_of_range_or_with_a_hole_are_answered_with_an_error():
    rig = Rig()
    seq, _ = book(rig, request_of(PROMPT, 12))
    answers = []
    rig.engine.land(seq, 0, 24, answers.append)
    rig.engine.land(seq, 8, 8, answers.append)
    rig.engine.land(seq, 8, 12, answers.append)
    rig.engine.land(77, 0, 4, answers.append)
    rig.turn()
    assert [type(answer) for answer in answers] == [TransferFailed, TransferFailed, Aborted, TransferFailed]


def test_open_pages_of_a_dropped_hand_over_are_free_only_when_proven():
    rig = Rig()
    request = request_of(PROMPT, 12)
    seq, _ = book(rig, request)
    landing = land(rig, seq, request, 0, 16)
    rig.engine.drop(seq, landing.pages[2:])
    rig.check()
    assert rig.holdings.pool.num_unproven == 2
    assert rig.idle_pages == 61
    assert rig.holdings.promised_pages == 0
    rig.engine.prove(landing.pages[2:])
    rig.assert_nothing_held()


@pytest.mark.parametrize("drop_first", [True, False])
def test_abort_and_drop_may_come_in_any_order(drop_first):
    rig = Rig()
    request = request_of(PROMPT, 12)
    seq, _ = book(rig, request)
    landing = land(rig, seq, request, 0, 16)
    wish = []
    rig.engine.land(seq, 16, 23, wish.append)
    for step in (0, 1) if drop_first else (1, 0):
        if step == 0:
            rig.engine.drop(seq, landing.pages[:1])
        else:
            rig.engine.abort(seq)
        rig.check()
    assert isinstance(wish[0], Aborted)
    rig.engine.prove(landing.pages[:1])
    rig.assert_nothing_held()


def test_pages_of_an_aborted_hand_over_stay_until_drop():
    rig = Rig()
    request = request_of(PROMPT, 12)
    seq, _ = book(rig, request)
    land(rig, seq, request, 0, 16)
    rig.engine.abort(seq)
    rig.run()
    assert rig.idle_pages == 63 - 4
    rig.engine.drop(seq, ())
    rig.assert_nothing_held()


def test_bookings_are_served_strictly_in_order():
    rig = Rig(num_rows=1)
    running = rig.submit([5] * 4, 6)
    rig.turn()
    order = []
    for name in range(3):
        rig.engine.book(request_of(PROMPT, 3), 1e9, lambda result, name=name: order.append((name, result)))
    rig.run()
    assert [name for name, _ in order] == [0]
    assert running in rig.sink.finished
    rig.engine.abort(order[0][1].seq)
    rig.run()
    assert [name for name, _ in order] == [0, 1]


def test_a_booking_is_honoured_by_retraction_and_the_retracted_text_is_right():
    rig = Rig(num_pages=17, page_tokens=4, horizon_tokens=0, finish_reserve_pages=0)
    request = request_of([3] * 24, 2)
    local = rig.submit([5] * 12, 40)
    rig.turn()
    seq, answers = book(rig, request)
    assert isinstance(answers[0], Booking)
    # The local text grows into the pages that were promised.
    rig.run_while(lambda: rig.holdings.pool.num_free >= 6)
    assert rig.holdings.promised_pages == 6
    wish = []
    rig.engine.land(seq, 0, 24, wish.append)
    rig.run_while(lambda: not wish, limit=4)
    assert rig.engine.statistics()["retractions"] == 1
    write(rig, request, wish[0])
    rig.engine.commit(seq, reply([3] * 24, 1), (), None, 0)
    rig.run()
    assert rig.sink.tokens[local] == reply([5] * 12, 40)
    assert rig.sink.tokens[seq] == reply([3] * 24, 2)[1:]
    rig.assert_nothing_held()


# Pressure.


def test_retraction_changes_no_text_and_is_counted():
    prompts = [[10 + i] * 6 for i in range(5)]
    rig = Rig(num_pages=16, horizon_tokens=0, finish_reserve_pages=0)
    seqs = [rig.submit(prompt, 30, seed=i) for i, prompt in enumerate(prompts)]
    rig.run()
    assert rig.engine.statistics()["retractions"] > 0
    assert rig.engine.statistics()["recomputed_tokens"] > 0
    for i, (seq, prompt) in enumerate(zip(seqs, prompts, strict=True)):
        assert rig.sink.tokens[seq] == reply(prompt, 30, i)
    assert (
        sum(event.recomputed_tokens for event in rig.sink.finished.values())
        == (rig.engine.statistics()["recomputed_tokens"])
    )
    rig.assert_nothing_held()


def test_a_reserve_for_growth_avoids_retraction():
    rig = Rig(num_pages=24, horizon_tokens=32)
    for i in range(4):
        rig.submit([10 + i] * 6, 30)
    rig.run()
    assert rig.engine.statistics()["retractions"] == 0


def test_a_sequence_retracted_often_is_spared_while_others_are_not():
    rig = Rig(num_pages=40, num_rows=4, horizon_tokens=0)
    seqs = [rig.submit([10 + i] * 6, 60) for i in range(3)]
    rig.run_while(lambda: len(rig.sink.started) < 3)
    rows = rig.holdings.rows
    rows.preempts[rig.holdings.sequences[seqs[0]].row] = 3
    rig.engine._planner._retract_one(rig.clock.now(), keep=0)
    rig.engine._planner._retract_one(rig.clock.now(), keep=0)
    assert rows.seq[rows.in_state(RowState.RUNNING)].tolist() == [seqs[0]]
    rig.run()
    assert len(rig.sink.finished) == 3


def test_a_long_prompt_does_not_starve_behind_short_ones():
    rig = Rig(num_pages=20, num_rows=4, max_bypass=4, horizon_tokens=0, finish_reserve_pages=0)
    for i in range(3):
        rig.submit([i + 1] * 8, 10)
    rig.turn()
    long = rig.submit([50] * 60, 3)
    for i in range(200):
        if long in rig.sink.started:
            break
        rig.submit([i % 90] * 8, 10)
        rig.turn()
    assert long in rig.sink.started
    assert rig.sink.tokens[long] == reply([50] * 60, 3)[: len(rig.sink.tokens[long])]


def test_a_short_prompt_passes_a_long_one_that_is_being_computed():
    rig = Rig(num_pages=200, chunk_tokens=16)
    long = rig.submit([50] * 400, 2)
    rig.turn()
    short = rig.submit([7] * 3, 2)
    for _ in range(4):
        rig.turn()
    assert short in rig.sink.started
    assert long not in rig.sink.started


def test_half_computed_short_prompts_do_not_queue_behind_a_long_one_which_still_ends():
    rig = Rig(num_pages=600, num_rows=8, chunk_tokens=32, max_waiting=100)
    long = rig.submit([50] * 1200, 2)
    rig.turn()
    waits, asked = [], {}
    for turn in range(130):
        if turn % 6 == 0:
            asked[rig.submit([turn % 90 + 1] * 40, 2)] = turn
        rig.turn()
        for seq in [seq for seq in asked if seq in rig.sink.started]:
            waits.append(turn - asked.pop(seq))
    assert len(waits) >= 15
    assert max(waits) <= 12
    assert long in rig.sink.started


def test_a_twin_waits_for_the_page_that_is_being_computed():
    rig = Rig(chunk_tokens=32)
    first, second = rig.submit(PROMPT, 3), rig.submit(PROMPT, 3)
    rig.run()
    assert rig.sink.started[second].num_cached_tokens == 20
    assert rig.sink.tokens[first] == rig.sink.tokens[second] == reply(PROMPT, 3)


def test_a_flushed_cache_is_found_no_more():
    rig = Rig()
    rig.submit(PROMPT, 5)
    rig.run()
    running = rig.submit(PROMPT, 30)
    rig.run_while(lambda: running not in rig.sink.started)
    rig.engine.flush_cache()
    rig.check()
    second = rig.submit(PROMPT, 5)
    rig.run()
    assert rig.sink.started[second].num_cached_tokens == 0
    assert rig.sink.tokens[running] == reply(PROMPT, 30)
    assert rig.sink.kv_events[-1].kind != "cleared"
    rig.assert_nothing_held()


def test_a_row_given_back_under_a_step_in_flight_is_booked_only_after_that_step():
    rig = Rig(num_rows=1, ring_tokens=5)
    running = rig.submit(PROMPT[:4], 50)
    for _ in range(3):
        rig.turn()
    answers = []
    rig.engine.book(request_of(PROMPT, 3), 1e9, answers.append)
    rig.engine.abort(running)
    # The step in flight still writes the row's ring when it is collected in this pass.
    rig.turn()
    assert answers == []
    rig.turn()
    assert isinstance(answers[0], Booking)
