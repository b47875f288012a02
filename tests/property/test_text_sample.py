"""A sample's text, counts and end do not depend on how many tokens arrive per delta."""

from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.sample import SampleText
from gateway.text.tokenizer import Tokenizer
from tests.fakes.generator import fake_logprob
from tests.fakes.tokenizer import byte_level_definition

TOKENIZER = Tokenizer(byte_level_definition())
VOCABULARY = TOKENIZER.vocabulary
WORDS = ["Hello", " the", " end", "你好", "🌍", "!", " naïve", "\n"]


@st.composite
def samples(draw):
    text = "".join(draw(st.lists(st.sampled_from(WORDS), max_size=10)))
    ids = list(TOKENIZER.encode_prompt(text)) if text else []
    stops = draw(st.lists(st.sampled_from(["end", "好", "lo the", "🌍!", " n", "zzz"]), max_size=3))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    edges = [0, *cuts, len(ids)]
    pushes = [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return ids, pushes, stops, draw(st.integers(0, 5))


def run(pushes: list[list[int]], stops: list[str], min_tokens: int):
    sample = SampleText(VOCABULARY, stops=stops, min_tokens=min_tokens)
    text, tokens = "", []
    for number, push in enumerate(pushes, start=1):
        piece = sample.push(
            Delta(
                token_ids=tuple(push),
                logprobs=tuple(fake_logprob(token, 0) for token in push),
                finish=FinishReason.LENGTH if number == len(pushes) else None,
            )
        )
        text += piece.text
        tokens += [entry.token for entry in piece.logprobs]
        assert piece.num_tokens == len(piece.logprobs)
        if piece.finish is not None:
            return text, tokens, sample.num_tokens, piece.finish
    raise AssertionError("no piece carried the finish")


@settings(max_examples=60, derandomize=True, deadline=None)
@given(samples())
def test_any_cut_into_deltas_gives_the_same_sample(case):
    ids, pushes, stops, min_tokens = case
    one_by_one = [[token] for token in ids] or [[]]
    assert run(pushes, stops, min_tokens) == run(one_by_one, stops, min_tokens)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(samples())
def test_usage_counts_the_fewest_tokens_whose_text_holds_the_stop_string(case):
    ids, pushes, stops, _ = case
    text, tokens, count, finish = run(pushes, stops, 0)
    assert tokens == ids[:count]
    if finish is FinishReason.STOP:
        assert any(stop in TOKENIZER.decode(ids[:count]) for stop in stops)
        assert not any(stop in TOKENIZER.decode(ids[: count - 1]) for stop in stops)
        assert not any(stop in text for stop in stops)
    else:
        assert text == TOKENIZER.decode(ids)
        assert count == len(ids)
