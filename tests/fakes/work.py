"""The work of a call in Python calls: what a test may bound, as a time on a shared machine is another every run."""

import sys
from collections.abc import Callable


def calls_of(function: Callable[[], object]) -> int:
    """Run ``function`` once and return how many calls, of Python or of C, it made; the same on every machine."""
    calls, before = 0, sys.getprofile()

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls - 1  # the one that ends the count
