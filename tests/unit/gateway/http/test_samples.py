"""Pieces that go out at once and pieces that cannot: one order, one end, errors where they belong."""

import pytest

from core.ids import RequestId
from core.request import FinishReason, SamplingParams, StopRules
from gateway.generation import Delta, Prompt
from gateway.http.samples import Sample, run_samples
from gateway.text.sample import SampleText
from tests.fakes.generator import ScriptedGenerator

WORDS = ("one ", "two ", "three ", "stop", " four")


class Vocabulary:
    size = len(WORDS)
    token_bytes = [word.encode() for word in WORDS]
    token_text = list(WORDS)
    special_ids = frozenset()
    rules = type("Rules", (), {"strips_leading_space": False})()


def sample(**rules):
    prompt = Prompt(
        request_id=RequestId("r"),
        model="m",
        token_ids=(1,),
        sampling=SamplingParams(),
        stop=StopRules(max_tokens=10),
        timeout_s=5,
    )
    return Sample(0, 0, prompt, SampleText(Vocabulary(), **rules))


def script(tokens, finish=FinishReason.LENGTH):
    deltas = [Delta(token_ids=(token,)) for token in tokens]
    return ScriptedGenerator(lambda _: [Delta(token_ids=(0,), num_cached_tokens=0), *deltas, Delta(finish=finish)])


async def run(generator, takes, **rules):
    """Return (what the sink got, what went out at once), in the order of all."""
    order, budget = [], list(takes)

    async def sink(steps):
        order.extend(("sink", step.piece.text, step.piece.finish) for step in steps)

    def now(_sample, piece):
        took = budget.pop(0) if budget else True
        if took == "fail":
            raise RuntimeError("no connection")
        if took:
            order.append(("now", piece.text, None))
        return took

    await run_samples(generator, [sample(**rules)], sink, now)
    return order


async def test_a_piece_that_cannot_go_out_at_once_goes_the_long_way_in_its_place():
    order = await run(script([1, 2, 1, 2]), [True, False, True, True])
    assert order == [
        ("sink", "one ", None),
        ("now", "two ", None),
        ("sink", "three ", None),
        ("now", "two ", None),
        ("now", "three ", None),
        ("sink", "", FinishReason.LENGTH),
    ]


async def test_a_stop_string_in_a_piece_at_once_ends_the_sample_and_closes_the_generator():
    generator = script([1, 3, 4, 4])
    order = await run(generator, [], stops=("stop",))
    assert order[-1] == ("sink", "", FinishReason.STOP)
    assert [text for _, text, _ in order] == ["one ", "two ", ""]
    assert generator.num_open == 0


async def test_an_error_at_once_is_the_samples_own_and_not_its_callers():
    generator = script([1, 2])
    with pytest.raises(RuntimeError, match="no connection"):
        await run(generator, [True, "fail"])
    assert generator.num_open == 0
