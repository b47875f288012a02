from core.request import FinishReason
from gateway.generation import Delta
from gateway.text.sample import SampleText
from gateway.text.tokenizer import Tokenizer
from tests.fakes.generator import fake_logprob
from tests.fakes.tokenizer import byte_level_definition

TOKENIZER = Tokenizer(byte_level_definition())
VOCABULARY = TOKENIZER.vocabulary
IM_END = 2


def test_tokens_after_a_completed_stop_string_are_dropped_and_metered():
    ids = TOKENIZER.encode_prompt("Hello!xyz")
    sample = SampleText(VOCABULARY, stops=["!"])
    piece = sample.push(Delta(token_ids=ids, logprobs=tuple(fake_logprob(t, 0) for t in ids)))
    upto = len(TOKENIZER.encode_prompt("Hello!"))
    assert (piece.text, piece.finish, piece.num_tokens) == ("Hello", FinishReason.STOP, upto)
    assert (sample.num_tokens, sample.num_surplus) == (upto, len(ids) - upto)
    assert len(piece.logprobs) == upto


def test_a_stop_string_wins_over_a_length_end_in_the_same_delta():
    ids = TOKENIZER.encode_prompt("Hello!")
    piece = SampleText(VOCABULARY, stops=["!"]).push(Delta(token_ids=ids, finish=FinishReason.LENGTH))
    assert piece.finish is FinishReason.STOP


def test_the_end_token_counts_but_says_nothing():
    ids = TOKENIZER.encode_prompt("Hi")
    sample = SampleText(VOCABULARY, silent=frozenset({IM_END}), skip_special=False)
    piece = sample.push(Delta(token_ids=(*ids, IM_END), finish=FinishReason.STOP))
    assert piece.text == "Hi"
    assert piece.num_tokens == sample.num_tokens == len(ids) + 1


def test_an_end_in_a_delta_of_its_own_releases_what_was_held_back():
    sample = SampleText(VOCABULARY, stops=["!!"])
    ids = TOKENIZER.encode_prompt("Hi!")
    assert sample.push(Delta(token_ids=ids)).text == "Hi"
    last = sample.push(Delta(finish=FinishReason.LENGTH))
    assert (last.text, last.finish, last.num_tokens) == ("!", FinishReason.LENGTH, 0)


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens():
    exclamation = TOKENIZER.encode_prompt("!")
    sample = SampleText(VOCABULARY, stops=["!"], min_tokens=2)
    pieces = [sample.push(Delta(token_ids=exclamation)) for _ in range(3)]
    assert [piece.text for piece in pieces] == ["!", "!", ""]
    assert [piece.finish for piece in pieces] == [None, None, FinishReason.STOP]


def test_a_broken_character_at_the_end_can_complete_a_stop_string():
    ids = TOKENIZER.encode_prompt("Hi€")[:-1]
    sample = SampleText(VOCABULARY, stops=["\ufffd"])
    piece = sample.push(Delta(token_ids=ids, finish=FinishReason.LENGTH))
    assert (piece.text, piece.finish) == ("Hi", FinishReason.STOP)
