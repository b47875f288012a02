from hypothesis import given
from hypothesis import strategies as st

from gateway.text.shield import Shield, SpecialToken

GUARD = "\ufdd0"
SHIELD = Shield((SpecialToken(1, "<|a|>"), SpecialToken(2, "a|><"), SpecialToken(3, "<pad>", strips_right=True)))


def specials(text: str, shield: Shield = SHIELD) -> list[int]:
    return [part.index for part in shield.split(text, GUARD) if isinstance(part, SpecialToken)]


def plain(text: str, shield: Shield = SHIELD) -> str:
    return "".join(part for part in shield.split(text, GUARD) if isinstance(part, str))


@given(st.lists(st.text(alphabet="<|a>pd ", max_size=12), max_size=4))
def test_covered_strings_hold_no_special_token_however_a_template_joins_them(strings: list[str]):
    joined = "".join(SHIELD.cover(text, GUARD) for text in strings)
    assert specials(joined) == []
    assert plain(joined) == "".join(strings)


def test_without_cover_the_same_text_would_be_special():
    """Negative control."""
    assert specials("x<|a|>y") == [1]


def test_nested_values_and_keys_are_covered():
    covered = SHIELD.cover({"k<|a|>": ["<|a|>", {"x": "<pad>"}, 3, None]}, GUARD)
    assert specials(str(covered)) == []


def test_a_guard_is_chosen_that_the_text_does_not_use():
    assert SHIELD.choose_guard({"a": ["\ufdd0 text"], "\ufdd1": 1}) == "\ufdd2"


def test_a_token_that_swallows_whitespace_takes_it_from_the_segment_beside_it():
    assert list(SHIELD.split("x <pad>\n y", GUARD)) == ["x ", SpecialToken(3, "<pad>", strips_right=True), "y"]


def test_without_special_tokens_text_stays_whole():
    shield = Shield(())
    assert list(shield.split(shield.cover("<|a|>", GUARD), GUARD)) == ["<|a|>"]
