"""What a worker refuses at its door, with the field's name."""

import msgspec
import pytest

from core.errors import BadRequest, NeverFits
from core.request import Floors, GenerateRequest, SamplingParams, StopRules, check_request, with_floors


def request(tokens=(1, 2, 3), prompt=None, **changes):
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        sampling=changes.pop("sampling", SamplingParams()),
        stop=changes.pop("stop", StopRules(max_tokens=4)),
        **changes,
    )


def test_a_sound_request_passes_and_knows_its_outputs():
    asked = request((1, 2, 3, 4), prompt=3)
    check_request(asked, vocab_size=10, max_tokens_total=5)
    assert asked.num_output_tokens == 1


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (request(()), BadRequest, "empty"),
        (request((1,), prompt=2), BadRequest, "num_prompt_tokens"),
        (request((1, 10)), BadRequest, "token id 10 is outside"),
        (request((-1, 2)), BadRequest, "token id -1 is outside"),
        (request((1,) * 5), NeverFits, "5 tokens; this deployment fits at most 4"),
        (request(lora="x"), BadRequest, "LoRA"),
        (request(sampling=SamplingParams(logit_bias={99: 1.0})), BadRequest, "99"),
        (request(stop=StopRules(max_tokens=1, stop_token_ids=(77,))), BadRequest, "77"),
    ],
)
def test_what_can_never_run_is_refused_with_a_sentence(asked, kind, words):
    with pytest.raises(kind, match=words) as error:
        check_request(asked, vocab_size=10, max_tokens_total=5)
    assert error.value.param


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"repetition_penalty": 0}, {"num_logprobs": 21}],
)
def test_sampling_out_of_bounds_is_not_decoded(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, SamplingParams)


def test_an_unknown_sampling_field_is_not_decoded():
    with pytest.raises(msgspec.ValidationError, match="beams"):
        msgspec.convert({"beams": 2}, SamplingParams)


@pytest.mark.parametrize(
    "floors",
    [
        Floors(),
        Floors(encoder_floor=0, decoder_floor=7, hits=()),
        Floors(encoder_floor=4, decoder_floor=7, hits=(8,)),
        Floors(encoder_floor=12, decoder_floor=7, hits=(4, 8, 16)),
    ],
)
def test_floors_travel_in_a_request(floors):
    assert with_floors(request(), floors).floors == floors


def test_a_request_has_no_floors_before_an_attempt_chose_them():
    assert request().floors is None
    assert with_floors(request(), None) == request()
    assert request(encoder_floor=0, decoder_floor=0, floor_hit_tokens=-1).floors is None
