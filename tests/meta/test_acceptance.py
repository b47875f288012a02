"""docs/deploy.md answers every point of the acceptance list, by tests that exist."""

import re

from tests.meta.test_failure_modes import ROOT, missing

TEXT = (ROOT / "docs/deploy.md").read_text()


def test_every_point_has_an_answer():
    numbers = [int(number) for number in re.findall(r"^\| A(\d+) \|", TEXT, re.MULTILINE)]
    assert numbers == list(range(1, 25))


def test_every_test_that_is_named_exists():
    assert missing(TEXT) == []
