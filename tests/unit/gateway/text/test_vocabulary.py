import pytest

from core.errors import ConfigError
from gateway.text.vocabulary import build_vocabulary, byte_alphabet, read_rules

WORDS = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def test_the_byte_alphabet_names_every_byte_once():
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_byte_level_tokens_become_their_bytes_and_odd_ones_stay_literal():
    vocabulary = build_vocabulary(
        {"Ġthe": 0, "ä½": 1}, {2: ("<｜end｜>", True), 3: ("<think>", False)}, read_rules({"type": "ByteLevel"})
    )
    assert vocabulary.bytes_of(0) == b" the"
    assert vocabulary.bytes_of(1) == b"\xe4\xbd"
    assert vocabulary.bytes_of(2).decode() == "<｜end｜>"
    assert vocabulary.token_text[1] is None
    assert vocabulary.special_ids == {2}


def test_word_marker_tokens_become_spaces_and_byte_tokens_one_byte():
    vocabulary = build_vocabulary({"\u2581the": 0, "<0xE4>": 1, "<0x4>": 2}, {}, read_rules(WORDS))
    assert [vocabulary.bytes_of(i) for i in range(4)] == [b" the", b"\xe4", b"<0x4>", b""]
    assert vocabulary.rules.strips_leading_space


def test_without_byte_fallback_a_byte_token_is_plain_text():
    vocabulary = build_vocabulary({"<0xE4>": 0}, {}, read_rules({"type": "Metaspace", "replacement": "\u2581"}))
    assert vocabulary.bytes_of(0) == b"<0xE4>"


@pytest.mark.parametrize(("scheme", "strips"), [("always", True), ("first", True), ("never", False)])
def test_a_metaspace_decoder_strips_unless_it_never_prepends(scheme: str, strips: bool):
    rules = read_rules({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme})
    assert rules.strips_leading_space is strips


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": " "}]},
        {"type": "Metaspace", "replacement": "_"},
        {**WORDS, "decoders": [*WORDS["decoders"], {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
    ],
)
def test_a_decoder_that_is_not_understood_is_refused(decoder):
    with pytest.raises(ConfigError):
        read_rules(decoder)
