"""docs/failure-modes.md names tests that exist, and an answer to every public report."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/failure-modes.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def missing(text: str) -> list[str]:
    found = []
    for path, name in NAMED.findall(text):
        file = ROOT / path
        if not file.exists() or not re.search(rf"def {name}\(", file.read_text()):
            found.append(f"{path}::{name}")
    return found


def test_every_test_that_is_named_exists():
    assert missing(TEXT) == []


def test_every_report_has_an_answer():
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)]
    assert numbers == list(range(1, 46))


def test_the_check_finds_a_test_that_is_not_there():
    assert missing("`tests/meta/test_failure_modes.py::test_nothing_of_the_kind`") != []
