"""Renders what the launcher says of a cluster as a table for people. Pure text."""

from collections.abc import Mapping, Sequence
from typing import cast

COLUMNS = (
    ("id", 12),
    ("state", 10),
    ("revision", 9),
    ("pid", 8),
    ("restarts", 9),
    ("address", 22),
    ("http_address", 22),
)


def render_status(described: Mapping[str, object]) -> str:
    """Return the table: a headline, one line per process, and the reason where one is not ready."""
    lines = [f"cluster {described['name']}: {described['model']} at http://{described['http_address']}"]
    lines.append("".join(title.ljust(width) for title, width in COLUMNS).rstrip())
    for process in cast("Sequence[Mapping[str, object]]", described["processes"]):
        cells = [
            str(process.get(title) if process.get(title) is not None else "-").ljust(width) for title, width in COLUMNS
        ]
        lines.append("".join(cells).rstrip())
        if process.get("state") in {"backoff", "held"}:
            lines.append(f"    {process.get('reason')} (log: {process.get('log')})")
    return "\n".join(lines)
