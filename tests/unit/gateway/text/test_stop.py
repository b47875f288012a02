import pytest

from gateway.text.stop import StopScanner


def test_text_passes_through_without_stop_strings():
    scanner = StopScanner(())
    assert scanner.push("abc") == "abc"
    assert scanner.finish() == ""


def test_a_stop_string_over_pushes_is_found_and_nothing_of_it_shows():
    scanner = StopScanner(["<end>"])
    assert [scanner.push(text) for text in ("one <", "en", "d> two")] == ["one ", "", ""]
    assert scanner.matched == "<end>"


def test_text_held_back_is_released_when_it_becomes_something_else():
    scanner = StopScanner(["<end>"])
    assert [scanner.push(text) for text in ("<en", "try>")] == ["", "<entry>"]
    assert scanner.matched is None


def test_text_held_back_at_the_end_is_shown():
    scanner = StopScanner(["\n\n"])
    assert scanner.push("a\n") == "a"
    assert scanner.finish() == "\n"


@pytest.mark.parametrize("pieces", [["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]])
def test_the_match_that_completes_first_wins_however_the_text_is_cut(pieces: list[str]):
    scanner = StopScanner(["abcd", "c"])
    shown = ""
    for piece in pieces:
        shown += scanner.push(piece)
        if scanner.matched:
            break
    assert (shown, scanner.matched) == ("ab", "c")


def test_of_matches_that_complete_together_the_longest_wins():
    scanner = StopScanner(["c", "abc"])
    assert scanner.push("xabc") == "x"
    assert scanner.matched == "abc"


def test_a_repetitive_beginning_is_not_lost():
    scanner = StopScanner(["aab"])
    assert "".join(scanner.push(letter) for letter in "aaab") == "a"
    assert scanner.matched == "aab"
