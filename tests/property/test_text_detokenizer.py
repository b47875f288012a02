"""Incremental detokenization equals decoding the whole sequence, however it is cut; both equal the reference library."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tests.fakes.tokenizer import byte_fallback_definition, byte_level_definition

BYTE_LEVEL = Tokenizer(byte_level_definition())
FALLBACK = Tokenizer(byte_fallback_definition())
KINDS = {"byte-level": BYTE_LEVEL, "byte-fallback": FALLBACK}


def reference(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizer._parsing


@st.composite
def cut_sequences(draw, tokenizer: Tokenizer):
    """Any ids (a few beyond the tables too), and any cut of them into pushes, empty ones included."""
    # Bytes of broken characters should be common, so half of the ids come from the low range where the bytes live.
    some_id = st.one_of(st.integers(0, tokenizer.vocabulary.size + 3), st.integers(0, 262))
    ids = draw(st.lists(some_id, max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=12)))
    edges = [0, *cuts, len(ids)]
    return ids, [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_any_cut_of_any_sequence_equals_whole_text_decoding(kind: str, skip_special: bool):
    tokenizer = KINDS[kind]

    @settings(max_examples=60, derandomize=True, deadline=None)
    @given(cut_sequences(tokenizer))
    def check(case):
        ids, pushes = case
        detokenizer = Detokenizer(tokenizer.vocabulary, skip_special=skip_special)
        text = "".join(detokenizer.push(push) for push in pushes) + detokenizer.finish()
        assert text == tokenizer.decode(ids, skip_special=skip_special)

    check()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cut_sequences(BYTE_LEVEL), st.booleans())
def test_byte_level_decoding_equals_the_reference_library_on_any_ids(case, skip_special: bool):
    ids, _ = case
    expected = reference(BYTE_LEVEL).decode(ids, skip_special_tokens=skip_special)
    assert BYTE_LEVEL.decode(ids, skip_special=skip_special) == expected


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.text(max_size=30))
def test_texts_survive_encoding_and_decoding(text: str):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode_prompt(text), skip_special=False) == text


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_byte_fallback_decoding_equals_the_reference_library_on_encoded_text(text: str):
    ids = list(FALLBACK.encode_prompt(text))
    assert FALLBACK.decode(ids) == reference(FALLBACK).decode(ids)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cut_sequences(BYTE_LEVEL))
def test_no_character_is_shown_before_it_is_whole(case):
    """What has been shown is always a prefix of the final text: nothing is taken back."""
    ids, pushes = case
    whole = BYTE_LEVEL.decode(ids)
    detokenizer = Detokenizer(BYTE_LEVEL.vocabulary)
    shown = ""
    for push in pushes:
        shown += detokenizer.push(push)
        assert whole.startswith(shown)


def test_the_property_fails_for_a_detokenizer_that_decodes_each_push_alone():
    """Negative control: decoding per push breaks characters that span pushes."""
    ids = list(BYTE_LEVEL.encode_prompt("€"))
    assert len(ids) > 1
    alone = "".join(BYTE_LEVEL.decode([token]) for token in ids)
    assert alone != BYTE_LEVEL.decode(ids)
