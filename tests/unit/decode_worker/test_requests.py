"""The life of a request as a state machine."""

import itertools

import pytest

from core.errors import InvariantError
from core.ids import Handle, Incarnation
from core.request import Floors
from decode_worker.requests import Phase, Request
from decode_worker.streams import GatewayStream, StreamConfig
from kv_transfer.api import FirstTokens
from tests.fakes.engine import ask


def new_request(**changes):
    stream = GatewayStream(Incarnation("a" * 32), StreamConfig())
    return Request(stream, Handle(1), ask((1, 2, 3), **changes), None, 10.0)


ALLOWED = {
    "new": "local booking ended",
    "local": "running ended",
    "booking": "pulling local ended",
    "pulling": "running need_prefill local ended",
    "need_prefill": "booking local ended",
    "running": "ended",
    "ended": "",
}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(Phase, Phase)))
def test_every_pair_of_states_is_either_a_move_or_refused(source, target):
    request = new_request()
    request.phase = source
    if target in ALLOWED[source].split():
        request.move(target)
        assert request.phase is target
    else:
        with pytest.raises(InvariantError):
            request.move(target)
        assert request.phase is source


def test_what_is_computed_here_after_final_contains_the_token_that_was_sent_on():
    request = new_request()
    assert request.continued() is request.asked
    request.first = FirstTokens(tokens=(7,), logprobs=(), num_cached_tokens=2, finish="")
    assert request.continued().token_ids == (1, 2, 3, 7)
    assert request.continued().num_prompt_tokens == 3
    assert request.continued().num_cached_tokens == 2
    assert request.num_output_tokens == 1


def test_what_is_computed_here_after_final_is_computed_with_the_sources_floors():
    request = new_request()
    floors = Floors(encoder_floor=2, decoder_floor=1, hits=(2,))
    request.first = FirstTokens(tokens=(7,), logprobs=(), num_cached_tokens=2, finish="", floors=floors)
    assert request.continued().floors == floors


def test_a_resumed_request_reports_the_first_attempts_cached_tokens():
    assert new_request(num_cached_tokens=64).cached_tokens(3) == 64
    assert new_request().cached_tokens(3) == 3
