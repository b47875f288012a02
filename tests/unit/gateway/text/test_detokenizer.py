import time

from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tests.fakes.tokenizer import byte_fallback_definition, byte_level_definition

BYTE_LEVEL = Tokenizer(byte_level_definition())
FALLBACK = Tokenizer(byte_fallback_definition())


def test_a_character_over_several_tokens_is_shown_when_it_is_whole():
    ids = BYTE_LEVEL.encode_prompt("€")
    detokenizer = Detokenizer(BYTE_LEVEL.vocabulary)
    assert [detokenizer.push((token,)) for token in ids] == ["", "", "€"]


def test_an_unfinished_character_at_the_end_becomes_one_replacement_mark():
    ids = BYTE_LEVEL.encode_prompt("x€")
    detokenizer = Detokenizer(BYTE_LEVEL.vocabulary)
    assert detokenizer.push(ids[:-1]) == "x"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_hidden_unless_wanted_and_silent_ones_always():
    start, end = 1, 2
    plain = BYTE_LEVEL.encode_prompt("Hello")
    assert Detokenizer(BYTE_LEVEL.vocabulary).push((start, *plain, end)) == "Hello"
    shown = Detokenizer(BYTE_LEVEL.vocabulary, skip_special=False)
    assert shown.push((start, *plain)) == "<|im_start|>Hello"
    silent = Detokenizer(BYTE_LEVEL.vocabulary, skip_special=False, silent=frozenset({end}))
    assert silent.push((*plain, end)) == "Hello"
    assert silent.push((end,)) == ""


def test_a_silent_token_that_is_not_special_is_hidden_too():
    (token,) = BYTE_LEVEL.encode_prompt("!")
    assert Detokenizer(BYTE_LEVEL.vocabulary, silent=frozenset({token})).push((token,)) == ""


def test_a_text_that_stands_alone_loses_the_word_markers_first_space_and_a_continuation_keeps_it():
    ids = FALLBACK.encode_prompt("hello the")
    assert Detokenizer(FALLBACK.vocabulary).push(ids) == "hello the"
    assert Detokenizer(FALLBACK.vocabulary, continues=True).push(ids) == " hello the"


def test_only_the_very_first_space_is_stripped():
    space = FALLBACK.token_id("\u2581")
    assert space is not None
    detokenizer = Detokenizer(FALLBACK.vocabulary)
    assert [detokenizer.push((space,)) for _ in range(3)] == ["", " ", " "]


def test_byte_fallback_joins_bytes_into_characters():
    detokenizer = Detokenizer(FALLBACK.vocabulary)
    pieces = [detokenizer.push((token,)) for token in FALLBACK.encode_prompt("a🌍")]
    assert "".join(pieces) == "a🌍"
    assert "🌍" in pieces


def test_ids_beyond_the_tables_say_nothing():
    beyond = BYTE_LEVEL.vocabulary.size
    detokenizer = Detokenizer(BYTE_LEVEL.vocabulary)
    assert detokenizer.push((beyond,)) + detokenizer.push((beyond, beyond + 1)) == ""


def cost(num_tokens: int) -> float:
    ids = BYTE_LEVEL.encode_prompt("Hello €!") * (num_tokens // 8)
    detokenizer = Detokenizer(BYTE_LEVEL.vocabulary)
    start = time.thread_time()
    for token in ids:
        detokenizer.push((token,))
    return (time.thread_time() - start) / len(ids)


def test_cost_per_token_does_not_grow_with_the_output():
    """A detokenizer that decodes from the start each time would be 50 times dearer on the long text."""
    short = min(cost(400) for _ in range(5))
    long = min(cost(20_000) for _ in range(3))
    assert long < 8 * short
