import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import TransferFailed
from core.handover import TokenLogprobs
from core.ids import PageHash, RequestId
from core.request import FinishReason, Floors, StopRules
from gateway.resume import Output, build_request, finish_of
from tests.fakes.sim_gateway import prompt


def test_runs_in_order_are_taken_whole():
    output = Output()
    assert output.accept(0, [1, 2], ())[0] == [1, 2]
    assert output.accept(2, [3], ())[0] == [3]
    assert output.tokens == [1, 2, 3]


def test_repeated_positions_are_taken_once_with_their_log_probabilities():
    output = Output()
    first = [TokenLogprobs(token=token, logprob=-1.0) for token in (1, 2)]
    output.accept(0, [1, 2], first)
    again = [TokenLogprobs(token=token, logprob=-2.0) for token in (1, 2, 3)]
    tokens, logprobs = output.accept(0, [1, 2, 3], again)
    assert tokens == [3]
    assert logprobs == again[2:]
    assert output.accept(0, [1], ())[0] == []


def test_a_gap_is_an_error_and_takes_nothing():
    output = Output()
    output.accept(0, [1], ())
    with pytest.raises(TransferFailed, match="output tokens 1 to 2 never arrived"):
        output.accept(3, [4], ())
    assert output.tokens == [1]


def test_a_goodbye_that_counts_more_than_arrived_is_an_error():
    output = Output()
    output.accept(0, [1], ())
    output.check_complete(1)
    with pytest.raises(TransferFailed):
        output.check_complete(2)


@settings(max_examples=60, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=20))
def test_whatever_arrives_the_output_is_a_gapless_prefix(runs):
    truth, output, handed = list(range(100, 120)), Output(), []
    for position, length in runs:
        known = len(output)
        try:
            new, _ = output.accept(position, truth[position : position + length], ())
        except TransferFailed:
            assert position > known
        else:
            handed.extend(new)
    assert handed == output.tokens == truth[: len(handed)]


STOP = StopRules(max_tokens=4, stop_token_ids=(9,))


@pytest.mark.parametrize(
    ("output", "stop", "finish"),
    [
        ([], STOP, None),
        ([5], STOP, None),
        ([5, 2], STOP, FinishReason.STOP),
        ([5, 9], STOP, FinishReason.STOP),
        ([5, 6, 7, 8], STOP, FinishReason.LENGTH),
        ([5, 6, 7, 2], STOP, FinishReason.STOP),
        ([5, 2], StopRules(max_tokens=4, ignore_eos=True), None),
        ([5, 2], StopRules(max_tokens=4, min_tokens=3), None),
    ],
)
def test_what_arrived_may_already_end_the_request(output, stop, finish):
    assert finish_of(output, stop, (2,)) is finish


def test_a_continued_request_keeps_prompt_and_output_apart():
    asked = prompt(tokens=(1, 2, 3), max_tokens=9, tenant="t", cache_salt="s", priority=4)
    output = Output()
    output.accept(0, [7, 8], ())
    built = build_request(
        asked,
        request_id=RequestId("r"),
        attempt=2,
        output=output,
        page_hashes=(PageHash(b"h"),),
        timeout_s=3.0,
        num_cached_tokens=16,
    )
    assert built.token_ids == (1, 2, 3, 7, 8)
    assert (built.num_prompt_tokens, built.num_output_tokens, built.stop.max_tokens) == (3, 2, 9)
    assert (built.attempt, built.num_cached_tokens, built.timeout_s) == (2, 16, 3.0)
    assert (built.tenant, built.cache_salt, built.priority) == ("t", "s", 4)
    assert built.sampling == asked.sampling
    assert built.floors is None


def test_a_continued_request_carries_the_first_attempts_floors():
    floors = Floors(encoder_floor=4, decoder_floor=9, hits=(8, 12))
    built = build_request(
        prompt(tokens=range(20)),
        request_id=RequestId("r"),
        attempt=1,
        output=Output(),
        page_hashes=(),
        timeout_s=1.0,
        num_cached_tokens=12,
        floors=floors,
    )
    assert built.floors == floors
    assert (built.encoder_floor, built.floor_hit_tokens, built.floor_earlier_hits) == (4, 12, (8,))
