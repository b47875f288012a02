from core.request import FinishReason
from engine.scheduler.limits import Limits
from tests.fakes.engine_rig import EOS, Facts, request_of

LIMITS = Limits(Facts(max_positions=20))


def test_a_request_is_bounded_by_its_own_maximum_and_by_the_context():
    assert LIMITS.max_len(request_of([1] * 5, 7)) == 12
    assert LIMITS.max_len(request_of([1] * 5, 70)) == 20
    assert LIMITS.max_len(request_of([1] * 5, 7, outputs=(2, 3))) == 12


def test_end_of_text_stops_unless_ignored_and_each_id_counts_once():
    assert LIMITS.stop_ids(request_of([1], 1, stop_token_ids=(5, EOS, 5))) == (5, EOS)
    assert LIMITS.stop_ids(request_of([1], 1, ignore_eos=False, stop_token_ids=(5,))) == (EOS, 5)
    assert LIMITS.stop_ids(request_of([1], 1)) == ()


def test_end_of_text_is_masked_before_the_minimum_even_if_it_would_not_stop():
    assert LIMITS.masked_ids(request_of([1], 1, stop_token_ids=(5,))) == (EOS, 5)


def test_a_stop_id_counts_from_the_first_token_after_the_minimum():
    request = request_of([1] * 5, 9, stop_token_ids=(7,), min_tokens=2)
    assert LIMITS.finish_after(request, 7, 7) is None
    assert LIMITS.finish_after(request, 8, 7) is FinishReason.STOP
    assert LIMITS.finish_after(request, 8, 6) is None


def test_a_stop_id_at_the_length_bound_is_a_stop():
    request = request_of([1] * 5, 3, stop_token_ids=(7,))
    assert LIMITS.finish_after(request, 8, 6) is FinishReason.LENGTH
    assert LIMITS.finish_after(request, 8, 7) is FinishReason.STOP
