"""The commands of a page of the documentation, so that tests can run every one of them."""

import re


def commands_of(page: str) -> list[str]:
    """Return every command line of the page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line]
