"""Stop strings: the streamed result equals a plain definition on the whole text, however the text is cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.stop import StopScanner

LETTERS = "ab\u00e9"


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: at the first character where some stop string ends, the longest such stop wins."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def cut_texts(draw):
    text = draw(st.text(alphabet=LETTERS, max_size=24))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    return text, [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def scan(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = ""
    for piece in pieces:
        shown += scanner.push(piece)
        if scanner.matched is not None:
            return shown, scanner.matched
    return shown + scanner.finish(), None


STOPS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cut_texts(), STOPS)
def test_any_cut_gives_the_text_before_the_first_stop_string(case, stops: list[str]):
    text, pieces = case
    assert scan(pieces, stops) == expected(text, stops)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cut_texts(), STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(case, stops: list[str]):
    _, pieces = case
    scanner = StopScanner(stops)
    pushed = shown = ""
    for piece in pieces:
        shown += scanner.push(piece)
        pushed += piece
        if scanner.matched is not None:
            return
        held = pushed[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_scanner_without_holdback_would_leak():
    """Negative control: looking at each piece alone misses a stop string over a border."""
    assert scan(["xa", "bx"], ["ab"]) == ("x", "ab")
    assert "ab" not in "xa"
    assert "ab" not in "bx"
